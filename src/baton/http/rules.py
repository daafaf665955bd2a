"""What a request must be like: limits, and the shapes that two parsers could read in two ways."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn

from baton.http.messages import Request

# RFC 3986's reg-name, IP literals and a port; empty is allowed (RFC 9112, 3.2).
_is_host = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]*)?").fullmatch
_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
is_path = re.compile(rb"/[\x21-\x7e]*").fullmatch
_LONGEST_LENGTH = 19  # digits: what fits 64 bits


@dataclass(frozen=True)
class Limits:
    """What one server takes before it says no.

    Attributes:
        head_bytes: request line and headers (431); also trailers, and what stands between two pieces of a body.
        headers: how many of them (431).
        body_bytes: of one request (413).
        pipelined: requests that may wait behind the one under way; more pause the socket, and so do waiting bodies
            of ``body_bytes`` together.
        connections: open at once (503 and close).
        write_buffer_bytes: unsent answer at which whoever feeds it is paused.
        head_seconds: from a request's first byte to its last (408), however little comes at a time.
        idle_seconds: a connection without a request is closed after this.
        stall_seconds: a client that takes nothing of what waits for it is cut off after this.
    """

    head_bytes: int = 64 << 10
    headers: int = 128
    body_bytes: int = 64 << 20
    pipelined: int = 16
    connections: int = 10_000
    write_buffer_bytes: int = 256 << 10
    head_seconds: float = 60.0
    idle_seconds: float = 75.0
    stall_seconds: float = 75.0


class Refused(Exception):
    """A request that is answered by the server itself, and ends the connection."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


def check_head(request: Request, limits: Limits) -> bytes | None:
    """Refuse what two parsers could read in two ways, and what is too long by its own word.

    Returns:
        What the request expects of the server, or None.

    Raises:
        Refused: with the status that says so.
    """
    host = length = coding = expect = None
    for name, value in request.headers:
        if name == b"host":
            host = value if host is None else _twice(400, "Host")
        elif name == b"content-length":
            length = value if length is None else _twice(400, "Content-Length")
        elif name == b"transfer-encoding":
            coding = value if coding is None else _twice(501, "Transfer-Encoding")
        elif name == b"expect" and expect is None:
            expect = value
    if coding is not None:
        if length is not None:
            raise Refused(400, "Content-Length and Transfer-Encoding contradict each other")
        if coding.lower() != b"chunked" or request.http_1_0:
            raise Refused(501, "only the chunked Transfer-Encoding is supported")
    elif length is not None:
        if not length.isdigit():
            raise Refused(400, "Content-Length is not a number")
        if len(length) > _LONGEST_LENGTH or int(length) > limits.body_bytes:
            raise Refused(413, f"the body is over {limits.body_bytes} bytes")
    _check_host(host, request.http_1_0)
    return expect


def _check_host(host: bytes | None, http_1_0: bool) -> None:
    if host is None and http_1_0:
        return
    if host is None or not _is_host(host):
        raise Refused(400, "a request has exactly one Host header, and that is a host")


def _twice(status: int, name: str) -> NoReturn:
    raise Refused(status, f"more than one {name}")


def origin_form(method: str, target: bytes) -> bytes:
    """A *target* that is no path, as one with its query: a whole URL, which every server must take (RFC 9112, 3.2.2).

    Raises:
        Refused: 400, it is neither.
    """
    if target == b"*" and method == "OPTIONS":
        return target
    found = _ABSOLUTE.match(target)
    if found is not None:
        rest = target[found.end() :]
        path = rest if rest.startswith(b"/") else b"/" + rest
        if is_path(path):
            return path
    raise Refused(400, "the target is neither a path nor a URL")
