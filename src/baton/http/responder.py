"""The way back to a client: one answer, whole or in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from baton.http.messages import LAST_CHUNK, Header, Request, chunk, head, status_line


class Outlet(Protocol):
    """What a responder asks of its connection.

    Attributes:
        write_paused: whether the client is behind.
    """

    write_paused: bool

    def write(self, data: bytes) -> None: ...

    def soon(self, callback: Callable[[], None]) -> None:
        """Have *callback* called in the loop's next turn."""

    def abort(self, *, reset: bool = False) -> None: ...


class Responder:
    """The way back to the client for one request. The head goes first and once.

    ``on_pause`` and ``on_resume`` are called when the client's buffer fills and when it has drained: whoever
    feeds the answer sets them, and need not wait otherwise.

    What is likely to be followed by more within one turn of the loop is held until the end of that turn: a write is
    a system call, which costs more than all else that is done for it.
    """

    __slots__ = ("_chunked", "_connection", "_held", "_request", "ended", "on_pause", "on_resume", "started")

    def __init__(self, connection: Outlet, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._chunked = False
        self._held: list[bytes] = []
        self.started = False
        self.ended = False
        self.on_pause: Callable[[], None] | None = None
        self.on_resume: Callable[[], None] | None = None

    @property
    def paused(self) -> bool:
        """Whether the client is behind: feed it no more for now."""
        return self._connection.write_paused

    def send(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """A whole answer."""
        assert not self.started, "the head goes once"
        self.started = self.ended = True
        bodiless = self._request.method == "HEAD" or status in (204, 304) or status < 200
        framing = [] if status in (204, 304) else [(b"content-length", b"%d" % len(body))]
        data = self._head(status, [*headers, *framing])
        self._connection.write(data if bodiless else data + body)

    def start(self, status: int, headers: Iterable[Header]) -> None:
        """The head of an answer whose body comes in pieces."""
        assert not self.started, "the head goes once"
        self.started = True
        self._chunked = not self._request.http_1_0
        framing: list[Header] = [(b"transfer-encoding", b"chunked")] if self._chunked else []
        if not self._chunked:
            # HTTP/1.0 knows the end of such a body by the end of the connection.
            self._request.keep_alive = False
        self._hold(self._head(status, [*headers, *framing]))

    def write(self, data: bytes, *, last: bool = False) -> None:
        """A piece of the body; *last* when :meth:`end` is likely to follow at once."""
        if not data or self._request.method == "HEAD":
            return
        framed = chunk(data) if self._chunked else data
        if last:
            self._hold(framed)
        elif self._held:
            self._held.append(framed)
            self._flush()
        else:
            self._connection.write(framed)

    def end(self) -> None:
        """The end of a body that came in pieces."""
        assert self.started, "the head goes first"
        self.ended = True
        if self._chunked and self._request.method != "HEAD":
            self._held.append(LAST_CHUNK)
        self._flush()

    def abort(self, *, reset: bool = False) -> None:
        """Cut the connection: the client must see that the answer isn't whole; with *reset* it gets a reset."""
        self.ended = True
        self._held.clear()
        self._connection.abort(reset=reset)

    def _hold(self, data: bytes) -> None:
        if not self._held:
            self._connection.soon(self._flush)
        self._held.append(data)

    def _flush(self) -> None:
        if self._held:
            data = self._held[0] if len(self._held) == 1 else b"".join(self._held)
            self._held.clear()
            self._connection.write(data)

    def _head(self, status: int, headers: list[Header]) -> bytes:
        if not self._request.keep_alive:
            headers.append((b"connection", b"close"))
        elif self._request.http_1_0:
            headers.append((b"connection", b"keep-alive"))
        return head(status_line(status), headers)
