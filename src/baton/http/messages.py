"""HTTP messages as values, and how they are written: status lines, heads, chunks."""

from __future__ import annotations

import http
from collections.abc import Iterable

Header = tuple[bytes, bytes]

STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}

LAST_CHUNK = b"0\r\n\r\n"


class Request:
    """One request, read whole.

    Attributes:
        method: upper case.
        target: as it stood on the request line.
        path: of it, without the query.
        headers: in order, names in lower case.
        http_1_0: whether the client speaks HTTP/1.0, which knows no chunks.
        keep_alive: whether the connection goes on after the answer.
        body: freed from its framing.
    """

    __slots__ = ("body", "headers", "http_1_0", "keep_alive", "method", "path", "target")

    def __init__(self, method: str, target: bytes, headers: list[Header], *, http_1_0: bool, keep_alive: bool) -> None:
        self.method = method
        self.target = target
        self.path = target.partition(b"?")[0].decode("latin-1")
        self.headers = headers
        self.http_1_0 = http_1_0
        self.keep_alive = keep_alive
        self.body = b""

    def header(self, name: bytes) -> bytes | None:
        """The first value of *name* (lower case), or None."""
        return first(self.headers, name)


def first(headers: Iterable[Header], name: bytes) -> bytes | None:
    """The first value of header *name* (lower case), or None."""
    for key, value in headers:
        if key == name:
            return value
    return None


def status_line(status: int) -> bytes:
    """The status line, CRLF included; an unknown status has no phrase."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def head(start: bytes, headers: Iterable[Header]) -> bytes:
    """A whole head: start line (CRLF included), headers, blank line."""
    return start + b"".join([b"%b: %b\r\n" % pair for pair in headers]) + b"\r\n"


def chunk(data: bytes) -> bytes:
    """*data* as one chunk; it must not be empty, since an empty one ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
