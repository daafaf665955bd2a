"""HTTP/1.1 client on asyncio protocols: pools by origin, responses read whole or passed on as they come.

A response's head is awaited; its body is either collected, or fed by callbacks to a sink that can pause the
socket, so that a slow reader holds its writer back. Knows nothing of LLMs.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import httptools

from baton.http.messages import Header, first, head


class ClientError(ConnectionError):
    """A request that did not get its whole response."""


class ConnectFailed(ClientError):
    """No connection could be made; nothing was sent."""


class Broken(ClientError):
    """The peer closed or broke the protocol before its response was whole.

    Attributes:
        began: whether any byte of the response had come.
        reused: whether the connection had served a request before.
    """

    def __init__(self, message: str, *, began: bool, reused: bool) -> None:
        super().__init__(message)
        self.began = began
        self.reused = reused


class TooSlow(ClientError):
    """A deadline passed."""


@dataclass(frozen=True)
class Origin:
    """Where a server is.

    Attributes:
        host, port: of a TCP socket; an IPv6 address without brackets.
        tls: the context for TLS, or None for plain HTTP.
        path: of a Unix socket, in place of host and port.
    """

    host: str
    port: int
    tls: ssl.SSLContext | None = None
    path: str | None = None

    @property
    def authority(self) -> bytes:
        """The Host header's value."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode()


@dataclass(frozen=True)
class Timeouts:
    """Seconds, each None for no limit.

    Attributes:
        connect: until a connection stands.
        head: from the request's end to the response's head.
        idle_connection: a pooled connection is closed after this; below the 5 s after which vLLM's server closes.
    """

    connect: float | None = 5.0
    head: float | None = None
    idle_connection: float = 4.0


class Response:
    """A response whose head has come.

    Attributes:
        status: the HTTP status.
        headers: in order, names in lower case.
    """

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: ClientConnection, status: int, headers: list[Header]) -> None:
        self._connection = connection
        self.status = status
        self.headers = headers

    def header(self, name: bytes) -> bytes | None:
        """The first value of *name* (lower case), or None."""
        return first(self.headers, name)

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            Broken: it ended early.
        """
        return await self._connection.collect()

    async def feed(self, sink: Callable[[bytes], None]) -> None:
        """Call *sink* with each piece of the body as it comes, and return at its end.

        Raises:
            Broken: it ended early; the pieces so far were fed.
        """
        await self._connection.feed(sink)

    def pause(self) -> None:
        """Read no more from the socket until :meth:`resume`."""
        self._connection.pause()

    def resume(self) -> None:
        self._connection.resume()


class ClientConnection(asyncio.Protocol):
    """One connection to one server; one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[ClientConnection], None]) -> None:
        # for as long as the connection
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.requests = 0
        self.idle_since = 0.0
        # for as long as one exchange
        self._parser: httptools.HttpResponseParser | None = None
        self._head: asyncio.Future[Response] | None = None
        self._end: asyncio.Future[None] | None = None
        self._error: Broken | None = None
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._sink: Callable[[bytes], None] | None = None
        self._complete = True
        self._began = False
        self._keep_alive = True
        self._bodiless = False
        self._informational = False
        self._paused = False

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the next request can use it: the last response is whole and the peer keeps it open."""
        return self.open and self._complete and self._keep_alive

    def send(self, data: bytes, *, bodiless: bool) -> asyncio.Future[Response]:
        """Send one request; the future gives the response once its head is in.

        Args:
            data: head and body.
            bodiless: whether the response has no body whatever its head says (HEAD).
        """
        assert self._transport is not None and self._complete, "one request at a time"
        self._parser = httptools.HttpResponseParser(self)
        self._head = self._loop.create_future()
        self._end = None
        self._error = None
        self._pieces = []
        self._sink = None
        self._complete = False
        self._began = False
        self._bodiless = bodiless
        self.requests += 1
        self._transport.write(data)
        return self._head

    async def collect(self) -> bytes:
        await self._wait()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def feed(self, sink: Callable[[bytes], None]) -> None:
        self._sink = sink
        try:
            self._flush()
            await self._wait()
        finally:
            self._sink = None

    def _flush(self) -> None:
        """Hand the sink what has come since, in one piece."""
        if self._pieces and self._sink is not None:
            pieces, self._pieces = self._pieces, []
            self._sink(pieces[0] if len(pieces) == 1 else b"".join(pieces))

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._complete:
            self._end = self._loop.create_future()
            await self._end

    def pause(self) -> None:
        if not self._paused and self.open:
            assert self._transport is not None
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self.open:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Cut the connection: an exchange under way is given up, which the server sees."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            # Nothing was asked: whatever this is, the connection is out of step.
            self.close()
            return
        self._began = True
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail("the server switched protocols")
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is not valid HTTP/1.1 ({type(error).__name__})")
        # What one read brought goes on as one piece, still within this callback.
        self._flush()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._complete:
            if self._head is not None and self._head.done() and self._ends_with_connection():
                self.on_message_complete()
            else:
                self._fail("the server closed the connection before its answer was whole")
        self._keep_alive = False
        self._on_lost(self)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            # A second answer to one request: whatever comes next cannot be told apart from it.
            self._keep_alive = False
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._complete:
            return
        status = self._parser.get_status_code()
        self._informational = 100 <= status < 200
        if self._informational:
            return
        self._keep_alive = self._parser.should_keep_alive()
        if self._head is not None and not self._head.done():
            self._head.set_result(Response(self, status, self._headers))
        if self._bodiless:
            self._keep_alive = False
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
            return
        if self._complete:
            return
        self._complete = True
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    def _ends_with_connection(self) -> bool:
        """Whether the body under way is of the kind that ends when the connection does."""
        return first(self._headers, b"content-length") is None and first(self._headers, b"transfer-encoding") is None

    def _fail(self, message: str) -> None:
        self._complete = True
        self._keep_alive = False
        self._error = Broken(message, began=self._began, reused=self.requests > 1)
        for future in (self._head, self._end):
            if future is not None and not future.done():
                future.set_exception(self._error)
        self.close()


class Exchange:
    """One request and its response, as an async context manager; see :meth:`Pool.request`.

    A class and not a generator: it is entered twice for every request of a proxy.
    """

    __slots__ = ("_bodiless", "_connection", "_data", "_pool")

    def __init__(self, pool: Pool, data: bytes, *, bodiless: bool) -> None:
        self._pool = pool
        self._data = data
        self._bodiless = bodiless
        self._connection: ClientConnection | None = None

    async def __aenter__(self) -> Response:
        pool = self._pool
        connection = self._connection = pool.take() or await pool.connect()
        try:
            waiting = connection.send(self._data, bodiless=self._bodiless)
            if pool.timeouts.head is None:
                return await waiting
            return await asyncio.wait_for(waiting, pool.timeouts.head)
        except TimeoutError as error:
            connection.close()
            raise TooSlow(f"no answer within {pool.timeouts.head} s") from error
        except BaseException:
            # Cancelled or broken: the server must see that nobody waits any more.
            connection.close()
            raise

    async def __aexit__(self, *_: object) -> None:
        assert self._connection is not None
        self._pool.give_back(self._connection)


class Pool:
    """Connections to one origin. Idle ones are kept for the next request, newest first."""

    def __init__(self, origin: Origin, timeouts: Timeouts) -> None:
        self.origin = origin
        self.timeouts = timeouts
        self._idle: list[ClientConnection] = []
        self._all: set[ClientConnection] = set()
        self._host = (b"host", origin.authority)

    @property
    def size(self) -> int:
        """Open connections, idle and busy."""
        return len(self._all)

    def request(self, method: bytes, target: bytes, headers: Iterable[Header], body: bytes = b"") -> Exchange:
        """One exchange, to be entered with ``async with``: gives the response once its head is in.

        Leaving the block before the body was read cuts the connection, which the server sees. Entering raises:
            ConnectFailed: nothing was sent.
            Broken: the server closed early.
            TooSlow: the head did not come in time.
        """
        framing = [] if method in (b"GET", b"HEAD") else [(b"content-length", b"%d" % len(body))]
        data = head(b"%b %b HTTP/1.1\r\n" % (method, target), [self._host, *headers, *framing]) + body
        return Exchange(self, data, bodiless=method == b"HEAD")

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        limit = asyncio.get_running_loop().time() - self.timeouts.idle_connection
        for connection in [each for each in self._idle if each.idle_since < limit]:
            self._idle.remove(connection)
            connection.close()

    def close(self) -> None:
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    def take(self) -> ClientConnection | None:
        limit = asyncio.get_running_loop().time() - self.timeouts.idle_connection
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= limit:
                return connection
            connection.close()
        return None

    async def connect(self) -> ClientConnection:
        loop = asyncio.get_running_loop()
        origin = self.origin

        def made() -> ClientConnection:
            return ClientConnection(loop, self._lost)

        try:
            async with asyncio.timeout(self.timeouts.connect):
                if origin.path is not None:
                    _, connection = await loop.create_unix_connection(made, origin.path)
                else:
                    _, connection = await loop.create_connection(
                        made,
                        origin.host,
                        origin.port,
                        ssl=origin.tls,
                        server_hostname=origin.host if origin.tls is not None else None,
                    )
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {self.timeouts.connect} s") from error
        except OSError as error:
            raise ConnectFailed(f"no connection: {error.strerror or error}") from error
        self._all.add(connection)
        return connection

    def give_back(self, connection: ClientConnection) -> None:
        if connection.reusable:
            connection.resume()
            connection.idle_since = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    def _lost(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
