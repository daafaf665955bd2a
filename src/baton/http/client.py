"""HTTP/1.1 client: pools of connections by origin, and exchanges on them. Knows nothing of LLMs."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from baton.http.client_connection import (
    NEVER,
    ClientConnection,
    ConnectFailed,
    Late,
    OutOfDescriptors,
    Response,
    TlsFailed,
    TooLate,
    TooSlow,
)
from baton.http.messages import Header, head
from baton.http.outbox import Buffer, Outbox

JOINED_BYTES = 32 << 10
_CLOSED_AT_ONCE = "no connection: the server closed it at once"


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
        total: from the request's start, a connection included, to the response's last byte.
        idle_connection: a pooled connection is closed after this; below the 5 s after which vLLM's server closes.
    """

    connect: float | None = 5.0
    head: float | None = None
    total: float | None = None
    idle_connection: float = 4.0


class Exchange:
    """One request and its response, as an async context manager; see :meth:`Pool.request`.

    A class and not a generator: it is entered twice for every request of a proxy.

    Attributes:
        linger_seconds: may be set until it is left.
        late: with *late_seconds*: who leaves before the body was read shuts down the sending side only, and an answer
            that is whole within this time goes here. To be set before it is entered, as *send_by* is.
        patient: to be set before it is entered: it has a clock of its own, and :meth:`Pool.hush` does not concern it.
        send_by: not to be sent after this moment on the monotonic clock, when it had to wait for a connection.
        sent: whether the server can have got any of it.
    """

    __slots__ = (
        "_bodiless",
        "_connection",
        "_data",
        "_pool",
        "late",
        "late_seconds",
        "linger_seconds",
        "patient",
        "send_by",
        "sent",
    )

    def __init__(self, pool: Pool, data: Sequence[Buffer], *, bodiless: bool, linger_seconds: float) -> None:
        self._pool = pool
        self._data = data
        self._bodiless = bodiless
        self.linger_seconds = linger_seconds
        self.late: Late | None = None
        self.late_seconds = 0.0
        self.patient = False
        self.send_by = NEVER
        self.sent = False
        self._connection: ClientConnection | None = None

    async def __aenter__(self) -> Response:
        pool = self._pool
        times = pool.timeouts
        began = 0.0 if times.total is None else time.monotonic()
        connection = pool.take()
        if connection is None:
            connection = await pool.connect()
            if time.monotonic() > self.send_by:
                pool.give_back(connection)
                raise TooLate("no connection in time")
        self._connection = connection
        self.sent = True
        try:
            waiting = connection.send(self._data, bodiless=self._bodiless, busy=pool.busy)
            if self.patient:
                connection.patient = True
            if times.head is not None or times.total is not None:
                connection.limit(times.head, times.total, began)
                pool.watch(connection)
            return await waiting
        except BaseException:
            # Cancelled or broken: the server must see that nobody waits any more.
            self._leave(connection)
            raise

    async def __aexit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """What leaving the block does."""
        assert self._connection is not None
        if (self.late is not None and self._connection.unread) or not self._pool.give_back(self._connection):
            self._leave(self._connection)

    async def deliver(self) -> None:
        """In place of entering it: send the request, on a new connection, and wait for no answer.

        The connection is cut with the first byte of the answer's body, or after :attr:`linger_seconds`.

        Raises:
            ConnectFailed, TooSlow: nothing was sent.
        """
        pool = self._pool
        connection = await pool.connect()
        self.sent = True
        connection.send(self._data, bodiless=self._bodiless).add_done_callback(_heard)
        connection.linger(self.linger_seconds)
        pool.watch(connection)

    def _leave(self, connection: ClientConnection) -> None:
        """Cut the connection: now, or when the server is sure to have taken the request."""
        if self.linger_seconds and connection.open:
            connection.linger(self.linger_seconds)
            self._pool.watch(connection)
        elif self.late is not None:
            connection.give_up(self.late_seconds, self.late)
            self._pool.watch(connection)
        else:
            connection.close()


class Pool:
    """Connections to one origin. Idle ones are kept for the next request, newest first."""

    def __init__(self, origin: Origin, timeouts: Timeouts) -> None:
        self.origin = origin
        self.timeouts = timeouts
        self._idle: list[ClientConnection] = []
        self._all: set[ClientConnection] = set()
        self._closed = False
        self._outbox = Outbox()
        self._watch: asyncio.TimerHandle | None = None
        self._watch_at = NEVER
        self._host = b"host: %b\r\n" % origin.authority

    @property
    def busy(self) -> int:
        """Connections with an exchange under way."""
        return len(self._all) - len(self._idle)

    @property
    def size(self) -> int:
        """Open connections, idle and busy."""
        return len(self._all)

    def request(
        self,
        method: bytes,
        target: bytes,
        headers: Iterable[Header],
        body: Sequence[Buffer] = (),
        *,
        linger_seconds: float = 0.0,
    ) -> Exchange:
        """One exchange, to be entered with ``async with``: gives the response once its head is in.

        Leaving the block before the body was read cuts the connection, which the server sees. Entering raises:
            ConnectFailed: nothing was sent.
            Broken: the server closed early.
            TooSlow: the head did not come in time, or the request's time was over before it.

        Args:
            body: in pieces, which need not be joined.
            linger_seconds: for a request that the server must get even when nobody waits for its answer any more:
                who leaves before the first byte of the body cuts the connection only with that byte, or after this
                time. Who leaves while the connection is made has sent nothing, see :attr:`Exchange.sent`.
        """
        size = 0
        for piece in body:
            size += len(piece)
        start = head(b"%b %b HTTP/1.1\r\n%b" % (method, target, self._host), headers)
        if method not in (b"GET", b"HEAD"):
            start = b"%bcontent-length: %d\r\n\r\n" % (start[:-2], size)
        # One copy of a little costs less than a second piece.
        data = (b"".join((start, *body)),) if size < JOINED_BYTES else (start, *body)
        return Exchange(self, data, bodiless=method == b"HEAD", linger_seconds=linger_seconds)

    def watch(self, connection: ClientConnection) -> None:
        """See to it that *connection* hears when it is overdue.

        One timer does for all: setting and cancelling one for every exchange would cost more than the rest of it.
        """
        if connection.due < self._watch_at:
            if self._watch is not None:
                self._watch.cancel()
            self._watch_at = connection.due
            seconds = max(connection.due - time.monotonic(), 0.0)
            self._watch = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Tell those that are overdue, and set the timer for the one that is due next."""
        self._watch, self._watch_at = None, NEVER
        now = time.monotonic()
        for connection in [each for each in self._all if each.due <= now]:
            connection.overdue()
        waiting = [each for each in self._all if each.due < NEVER]
        if waiting:
            self.watch(min(waiting, key=lambda each: each.due))

    def sweep(self) -> None:
        """Close connections that have been idle for too long."""
        limit = time.monotonic() - self.timeouts.idle_connection
        for connection in [each for each in self._idle if each.idle_since < limit]:
            self._idle.remove(connection)
            connection.close()

    def hush(self, first: float, later: float) -> None:
        """Give up exchanges of which nothing was heard for so many seconds, see :meth:`ClientConnection.hush`."""
        now = time.monotonic()
        for connection in list(self._all):
            connection.hush(first, later, now)

    def close(self) -> None:
        """Cut every connection, those that are being made included; there will be no more."""
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self._all):
            connection.close()
        self._idle.clear()

    def take(self) -> ClientConnection | None:
        """An idle connection, or None."""
        limit = time.monotonic() - self.timeouts.idle_connection
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.idle_since >= limit:
                return connection
            connection.close()
        return None

    async def connect(self) -> ClientConnection:
        """A new connection.

        Raises:
            ConnectFailed: there is none; its subclasses say why, where more is known.
            TooSlow: the request's whole time was over first.
        """
        loop = asyncio.get_running_loop()
        origin, times = self.origin, self.timeouts
        connection = ClientConnection(loop, self._outbox, self._lost)
        tls, name = origin.tls, None if origin.tls is None else origin.host
        all_of_it = times.total is not None and (times.connect is None or times.total <= times.connect)
        seconds = times.total if all_of_it else times.connect
        # Known from here on, so that close() finds it; whatever ends this early leaves nothing open.
        self._all.add(connection)
        try:
            async with asyncio.timeout(seconds) as clock:
                if origin.path is not None:
                    await loop.create_unix_connection(lambda: connection, origin.path, ssl=tls, server_hostname=name)
                else:
                    await loop.create_connection(
                        lambda: connection, origin.host, origin.port, ssl=tls, server_hostname=name
                    )
            if self._closed or not connection.open:
                raise ConnectFailed("no connection: the pool is closed" if self._closed else _CLOSED_AT_ONCE)
        except BaseException as error:
            self._lost(connection)
            connection.close()
            if isinstance(error, TimeoutError) and clock.expired():
                late = f"no connection within {seconds} s"
                raise (TooSlow(late) if all_of_it else ConnectFailed(late)) from error
            if isinstance(error, OSError) and not isinstance(error, ConnectFailed):
                raise _explained(error) from error
            raise
        return connection

    def give_back(self, connection: ClientConnection) -> bool:
        """Keep a connection for the next request; False when it cannot serve one."""
        if self._closed or not connection.reusable:
            return False
        if connection.paused:
            connection.resume()
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        return True

    def _lost(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


def _heard(answer: asyncio.Future[Response]) -> None:
    """Look at an answer that nobody waits for, so that a failure is not reported as unseen."""
    if not answer.cancelled():
        answer.exception()


def _explained(error: OSError) -> ConnectFailed:
    """The failure to connect that *error* is."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfDescriptors("no connection: this side has no file descriptors left")
    if isinstance(error, ssl.SSLCertVerificationError):
        return TlsFailed(f"no connection: the server's certificate is not trusted: {error.verify_message}")
    if isinstance(error, ssl.SSLError):
        return TlsFailed(f"no connection: TLS failed: {error.reason or error}")
    return ConnectFailed(f"no connection: {error.strerror or error}")
