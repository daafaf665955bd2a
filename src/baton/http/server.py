"""HTTP/1.1 server on asyncio protocols: parses strictly, answers in order, buffers within bounds.

A request is read whole, then its handler runs as a task; the next request of the connection waits. An
answer is written as it comes; a client that is slow pauses whoever feeds it. Knows nothing of LLMs.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import cast

import httptools

from baton.http.messages import LAST_CHUNK, Header, Request, chunk, head, status_line

logger = logging.getLogger("baton.http")

SWEEP_SECONDS = 1.0

Handler = Callable[[Request, "Responder"], Awaitable[None]]
Refusal = Callable[[int, str], tuple[bytes, bytes]]
"""From a status and a reason to the content type and body of a refusal."""


@dataclass(frozen=True)
class Limits:
    """What one server takes before it says no.

    Attributes:
        head_bytes: request line and headers (431).
        headers: how many of them (431).
        body_bytes: of one request (413).
        pipelined: requests that may wait behind the one under way; more pause the socket.
        connections: open at once (503 and close).
        write_buffer_bytes: unsent answer at which whoever feeds it is paused.
        head_seconds: from a connection's or a request's first byte to the request's last (408).
        idle_seconds: a connection without a request is closed after this.
    """

    head_bytes: int = 64 << 10
    headers: int = 128
    body_bytes: int = 64 << 20
    pipelined: int = 16
    connections: int = 10_000
    write_buffer_bytes: int = 256 << 10
    head_seconds: float = 60.0
    idle_seconds: float = 75.0


class Gone(ConnectionError):
    """The client has left."""


class Responder:
    """The way back to the client for one request. The head goes first and once.

    ``on_pause`` and ``on_resume`` are called when the client's buffer fills and when it has drained: whoever
    feeds the answer sets them, and need not wait otherwise.
    """

    __slots__ = ("_chunked", "_connection", "_request", "ended", "on_pause", "on_resume", "started")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self._request = request
        self._chunked = False
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
        self._connection.write(self._head(status, [*headers, *framing]))

    def write(self, data: bytes) -> None:
        """A piece of the body."""
        if data and self._request.method != "HEAD":
            self._connection.write(chunk(data) if self._chunked else data)

    def end(self) -> None:
        """The end of a body that came in pieces."""
        self.ended = True
        if self._chunked and self._request.method != "HEAD":
            self._connection.write(LAST_CHUNK)

    def abort(self) -> None:
        """Cut the connection: the client must see that the answer isn't whole."""
        self.ended = True
        self._connection.abort()

    def _head(self, status: int, headers: list[Header]) -> bytes:
        if not self._request.keep_alive:
            headers.append((b"connection", b"close"))
        elif self._request.http_1_0:
            headers.append((b"connection", b"keep-alive"))
        return head(status_line(status), headers)


class Refused(Exception):
    """A request that is answered by the server itself, and ends the connection."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: Server) -> None:
        # for as long as the server
        self._server = server
        self._limits = server.limits
        # for as long as the connection
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._responder: Responder | None = None
        self._closing = False
        self.deadline = float("inf")
        self._reading = True
        self.write_paused = False
        # for as long as a request is being read
        self._request: Request | None = None
        self._target = b""
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._body_bytes = 0

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._limits.write_buffer_bytes)
        self._server.connections.add(self)
        if len(self._server.connections) > self._limits.connections:
            self._refuse(Refused(503, "too many connections"))
            return
        self._arm(self._limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self._disarm()
        self._closing = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self._server.check_drained()

    def eof_received(self) -> bool:
        # A client that shut down only its sending side looks like one that left. An answer costs an engine's
        # time and memory, so that leaving is what is assumed, as nginx does.
        return False

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._request is None and self._task is None:
            self._arm(self._limits.head_seconds)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserCallbackError, httptools.HttpParserError) as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Refused) else Refused(400, "the request is not valid HTTP/1.1"))

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._target = b""
        self._headers = []
        self._head_bytes = 0
        self._pieces = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if len(self._headers) >= self._limits.headers:
            raise Refused(431, f"more than {self._limits.headers} headers")
        if b"\0" in value or b"\r" in value or b"\n" in value:
            raise Refused(400, "a header holds a control character")
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refused(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if self._parser.should_upgrade():
            # What follows would not be HTTP/1.1, whoever sends it.
            raise Refused(501, "tunnels and protocol upgrades are not supported")
        request = Request(
            self._parser.get_method().decode(),
            self._target,
            self._headers,
            http_1_0=version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )
        check_head(request, self._limits)
        self._request = request
        expect = request.header(b"expect")
        if expect is not None:
            if expect.lower() != b"100-continue":
                raise Refused(417, "only 100-continue can be expected")
            if self._task is None and not request.http_1_0:
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            raise Refused(413, f"the body is over {self._limits.body_bytes} bytes")
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        request.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self._head_bytes = 0
        self._disarm()
        self._waiting.append(request)
        if self._task is None:
            self._next()
        elif len(self._waiting) >= self._limits.pipelined:
            self._pause_reading()

    # the rest

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close_when_idle(self) -> None:
        """Take no more requests; close when what is under way is answered."""
        self._closing = True
        self._waiting.clear()
        if self._task is None and self._transport is not None:
            self._transport.close()

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            raise Refused(431, f"the head is over {self._limits.head_bytes} bytes")

    def _next(self) -> None:
        request = self._waiting.popleft()
        self._responder = Responder(self, request)
        self._task = self._server.loop.create_task(self._run(request, self._responder))
        if not self._reading and len(self._waiting) < self._limits.pipelined:
            self._resume_reading()

    async def _run(self, request: Request, responder: Responder) -> None:
        """One handler; whatever it leaves open is closed here."""
        try:
            await self._server.handler(request, responder)
        except asyncio.CancelledError:
            # The client has left, or the server gives up waiting: nobody reads an answer.
            self.abort()
        except Exception:
            logger.exception("a handler failed on %s", request.path)
            if not responder.started:
                kind, body = self._server.refusal(500, "internal error")
                responder.send(500, [(b"content-type", kind)], body)
            else:
                responder.abort()
        if responder.started and not responder.ended:
            responder.abort()
        self._done(request)

    def _done(self, request: Request) -> None:
        self._task = None
        self._responder = None
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not request.keep_alive or (self._closing and not self._waiting):
            transport.close()
        elif self._waiting:
            self._next()
        else:
            self._arm(self._limits.idle_seconds)

    def _refuse(self, refused: Refused) -> None:
        """Answer for the handler and close: what follows on this connection cannot be trusted."""
        self._closing = True
        self._disarm()
        self._waiting.clear()
        if self._task is None:
            kind, body = self._server.refusal(refused.status, refused.reason)
            headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            self.write(head(status_line(refused.status), headers) + body)
            if self._transport is not None:
                self._transport.close()

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reading = True
            self._transport.resume_reading()

    def _arm(self, seconds: float) -> None:
        self.deadline = self._server.loop.time() + seconds

    def _disarm(self) -> None:
        self.deadline = float("inf")

    def late(self) -> None:
        """Called by the server's sweep once the deadline has passed."""
        self._disarm()
        if self._request is not None or self._head_bytes:
            self._refuse(Refused(408, "the request did not arrive in time"))
        elif self._task is None and self._transport is not None:
            self._transport.close()


def check_head(request: Request, limits: Limits) -> None:
    """Refuse what two parsers could read in two ways, and what is too long by its own word.

    Raises:
        Refused: with the status that says so.
    """
    lengths = [value for name, value in request.headers if name == b"content-length"]
    codings = [value for name, value in request.headers if name == b"transfer-encoding"]
    if codings and lengths:
        raise Refused(400, "Content-Length and Transfer-Encoding contradict each other")
    if len(lengths) > 1:
        raise Refused(400, "more than one Content-Length")
    if lengths and not lengths[0].isdigit():
        raise Refused(400, "Content-Length is not a number")
    if codings and (len(codings) > 1 or codings[0].strip().lower() != b"chunked" or request.http_1_0):
        raise Refused(501, "only the chunked Transfer-Encoding is supported")
    if lengths and int(lengths[0]) > limits.body_bytes:
        raise Refused(413, f"the body is over {limits.body_bytes} bytes")
    hosts = sum(1 for name, _ in request.headers if name == b"host")
    if hosts > 1 or (hosts == 0 and not request.http_1_0):
        raise Refused(400, "a request has exactly one Host header")


def plain_refusal(status: int, reason: str) -> tuple[bytes, bytes]:
    return b"text/plain; charset=utf-8", f"{status} {reason}\n".encode()


class Server:
    """A listening server.

    Args:
        handler: called for each request as a task; it answers through the responder.
        limits: what is taken.
        refusal: the body of answers that the server gives by itself.
    """

    def __init__(self, handler: Handler, limits: Limits | None = None, refusal: Refusal = plain_refusal) -> None:
        self.handler = handler
        self.limits = limits or Limits()
        self.refusal = refusal
        self.connections: set[Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._drained: asyncio.Event | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "listen first"
        return self._loop

    async def listen(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, reuse_port: bool = False
    ) -> list[tuple[str, int]]:
        """Listen on *host* and *port* (0: any); the addresses that were bound.

        Raises:
            OSError: the address cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        server = await self.loop.create_server(
            lambda: Connection(self), host, port, ssl=tls, backlog=4096, reuse_port=reuse_port or None
        )
        self._servers.append(server)
        self._sweep()
        return [each.getsockname()[:2] for each in server.sockets]

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket."""
        self._loop = asyncio.get_running_loop()
        self._servers.append(await self.loop.create_unix_server(lambda: Connection(self), path, backlog=4096))
        self._sweep()

    async def close(self, grace_seconds: float = 0.0) -> None:
        """Take no new connections, let what is under way finish for *grace_seconds*, then cut the rest."""
        for server in self._servers:
            server.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), grace_seconds)
            except TimeoutError:
                for connection in list(self.connections):
                    connection.abort()
                await asyncio.sleep(0)
        self._servers = []

    def _sweep(self) -> None:
        """Look after deadlines once a second: a timer a request would cost more than it is worth."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        now = self.loop.time()
        for connection in [each for each in self.connections if each.deadline <= now]:
            connection.late()
        self._sweeping = self.loop.call_later(SWEEP_SECONDS, self._sweep)

    def check_drained(self) -> None:
        if self._drained is not None and not self.connections:
            self._drained.set()
