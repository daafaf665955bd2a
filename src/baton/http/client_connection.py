"""One connection to a server, and the response that it reads.

A response's head is awaited; its body is either collected, or fed by callbacks to a sink that can pause the
socket, so that a slow reader holds its writer back.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import cast

import httptools

from baton.http.messages import Header, first
from baton.http.outbox import Buffer, Outbox
from baton.http.watch import watch_peer

HEAD_BYTES = 256 << 10
"""Of a response's head, of its trailers, and of what stands between two pieces of its body."""


NEVER = math.inf

Late = Callable[["Response", bytes], None]
"""Takes a whole answer that came when nobody waited for it any more."""


class ClientError(ConnectionError):
    """A request that did not get its whole response."""


class ConnectFailed(ClientError):
    """No connection could be made; nothing was sent."""


class OutOfDescriptors(ConnectFailed):
    """This process or this machine has no file descriptor left for a connection; the peer is not to blame."""


class TlsFailed(ConnectFailed):
    """The peer does not speak TLS, or is not who it should be."""


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


class TooLate(ClientError):
    """The moment after which a request was not to be sent had passed; nothing was sent."""


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

    def watch(self, on_broken: Callable[[ClientError], None]) -> None:
        """Call *on_broken* when it breaks, for who does something else before the body is read."""
        self._connection.watch(on_broken)

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            Broken: it ended early.
            TooSlow: the request's time was over first.
        """
        return await self._connection.collect()

    async def feed(self, sink: Callable[[bytes], None]) -> None:
        """Call *sink* with each piece of the body as it comes, and return at its end.

        Raises:
            Broken: it ended early; the pieces so far were fed.
            TooSlow: the request's time was over first; likewise.
        """
        await self._connection.feed(sink)

    def pause(self) -> None:
        """Read no more from the socket until :meth:`resume`."""
        self._connection.pause()

    def resume(self) -> None:
        self._connection.resume()


class _Odd(Exception):
    """A response that two parsers could read in two ways."""


class ClientConnection(asyncio.Protocol):
    """One connection to one server; one request at a time.

    Attributes:
        requests: how many it has served, with the one under way.
        idle_since: when it was given back, on the monotonic clock in seconds.
        due: when what is awaited now must have come, on the same clock; the pool calls :meth:`overdue` then.
        paused: whether its socket is not read.
        patient: whether :meth:`hush` does not concern the exchange under way.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, outbox: Outbox, on_lost: Callable[[ClientConnection], None]
    ) -> None:
        # for as long as the connection
        self._loop = loop
        self._outbox = outbox
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self.requests = 0
        self.idle_since = 0.0
        # for as long as one exchange
        self._parser: httptools.HttpResponseParser | None = None
        self._head: asyncio.Future[Response] | None = None
        self._end: asyncio.Future[None] | None = None
        self._error: ClientError | None = None
        self.due = NEVER
        self._head_seconds: float | None = None
        self._total: float | None = None
        self._total_at = NEVER
        self._undigested = 0
        self._headers: list[Header] = []
        self._pieces: list[bytes] = []
        self._sink: Callable[[bytes], None] | None = None
        self._on_broken: Callable[[ClientError], None] | None = None
        self._complete = True
        self._headed = False
        self._bodied = False
        self._began = False
        self._news = False
        self._quiet_since = 0.0
        self.patient = False
        self._keep_alive = True
        self._bodiless = False
        self._informational = False
        self.paused = False
        self._lingering = False
        self._status = 0
        self._late: Late | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        """Whether the next request can use it: the last response is whole and the peer keeps it open."""
        return self._complete and self._keep_alive and self.open

    @property
    def unread(self) -> bool:
        """Whether a whole answer is here that nobody has taken."""
        return self._complete and bool(self._pieces)

    def send(self, data: Sequence[Buffer], *, bodiless: bool, busy: int = 0) -> asyncio.Future[Response]:
        """Send one request; the future gives the response once its head is in.

        Args:
            data: head and body, in pieces.
            bodiless: whether the response has no body whatever its head says (HEAD).
            busy: how many exchanges are under way besides.
        """
        assert self._transport is not None and self._complete, "one request at a time"
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._head = self._loop.create_future()
        self._end = None
        self._error = None
        self._pieces = []
        self._sink = None
        self._on_broken = None
        self._complete = False
        self._headed = False
        self._bodied = False
        self._began = False
        self._news = True
        self.patient = False
        self._bodiless = bodiless
        self._undigested = 0
        self.requests += 1
        self._outbox.write(self._transport, data, busy)
        return self._head

    def linger(self, seconds: float) -> None:
        """Cut the connection with the first byte of the body, or after *seconds*: nobody waits for the answer."""
        if self._complete or self._bodied:
            self.close()
            return
        self._lingering = True
        self.resume()
        self.due = time.monotonic() + seconds

    def give_up(self, seconds: float, late: Late) -> None:
        """Have the server see that nobody waits, and yet hear an answer that is on its way already.

        The sending side is shut down, which servers take for a client that left; the connection is cut when theirs
        is, or after *seconds*. An answer that is whole by then is given to *late*.
        """
        if self._complete:
            if self._error is None and self._pieces:
                late(Response(self, self._status, self._headers), self._taken())
            self.close()
        elif self.open and self._end_sending():
            self._late = late
            self.resume()
            self.due = time.monotonic() + seconds
        else:
            self.close()

    def _end_sending(self) -> bool:
        """Shut down the sending side; whether that was possible."""
        assert self._transport is not None
        self._outbox.flush()
        if self._transport.can_write_eof():
            self._transport.write_eof()
            return True
        # TLS could only say that it ends both ways. The TCP connection below it can end one: the peer takes that for
        # the end, and what it has sent before can still be read.
        try:
            with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as same:
                same.shutdown(socket.SHUT_WR)
        except (OSError, AttributeError):
            return False
        return True

    def limit(self, head_seconds: float | None, total_seconds: float | None, since: float) -> None:
        """Give the request just sent no more than these times, each None for any.

        Args:
            head_seconds: from now to the response's head.
            total_seconds: from *since*, on the monotonic clock, to the response's last byte.
        """
        self._head_seconds, self._total = head_seconds, total_seconds
        self._total_at = NEVER if total_seconds is None else since + total_seconds
        self.due = self._total_at if head_seconds is None else min(time.monotonic() + head_seconds, self._total_at)

    def overdue(self) -> None:
        """What was awaited until :attr:`due` did not come."""
        if self._lingering or self._late is not None:
            self.close()
        elif not self._headed and self._head_seconds is not None and self.due < self._total_at:
            self._fail(TooSlow(f"no answer within {self._head_seconds} s"))
        else:
            self._fail(TooSlow(f"no whole answer within {self._total} s"))

    def hush(self, first: float, later: float, now: float) -> None:
        """Give up a server that says nothing: to be called now and then, since no clock is looked at when it does.

        Not one that is left already, nor one that is not read, since a slow reader holds it back.

        Args:
            first: seconds of silence before the first byte of the body.
            later: the same after it.
            now: on the monotonic clock.
        """
        if self._complete or self.patient or self._lingering or self._late is not None:
            return
        if self._news or self.paused:
            self._news, self._quiet_since = False, now
        if now - self._quiet_since >= (later if self._bodied else first):
            self._fail(TooSlow(f"nothing was heard for {now - self._quiet_since:.0f} s"))

    def watch(self, on_broken: Callable[[ClientError], None]) -> None:
        self._on_broken = on_broken
        if self._error is not None:
            on_broken(self._error)

    async def collect(self) -> bytes:
        await self._wait()
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _taken(self) -> bytes:
        """The body so far, which is no longer kept here."""
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
            self._sink(self._taken())

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._complete:
            self._end = self._loop.create_future()
            await self._end

    def pause(self) -> None:
        if not self.paused and self.open:
            assert self._transport is not None
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused and self.open:
            assert self._transport is not None
            self.paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Cut the connection: an exchange under way is given up, which the server sees."""
        self.due = NEVER
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        watch_peer(transport)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            # Nothing was asked: whatever this is, the connection is out of step.
            self.close()
            return
        self._began = self._news = True
        self._undigested += len(data)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._break("the server switched protocols")
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._break(str(cause) if isinstance(cause, _Odd) else f"not valid HTTP/1.1 ({type(error).__name__})")
        if self._undigested > HEAD_BYTES:
            # The parser keeps half a header to itself, however long it grows.
            self._break(f"the head is over {HEAD_BYTES} bytes")
        # What one read brought goes on as one piece, still within this callback.
        self._flush()

    def eof_received(self) -> bool:
        if not self._complete:
            if self._headed and self._ends_with_connection():
                self._complete_now()
            else:
                self._break("the connection was closed before the answer was whole")
        self._keep_alive = False
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        # Without an end before it this is a cut, also for a body that ends when the connection does.
        if not self._complete:
            self._break("the connection was lost before the answer was whole")
        self._keep_alive = False
        self._on_lost(self)

    # httptools' callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            # A second answer to one request: whatever comes next cannot be told apart from it.
            self._keep_alive = False
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        # One that comes after the head is a trailer, which nobody may take for a header.
        if not self._headed:
            name = name.lower()
            # Blanks after a value are none of it (RFC 9112, 5.1); the parser takes away only those before it.
            value = value.rstrip(b" \t")
            if name == b"transfer-encoding":
                self._check_coding(value)
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 100:
            raise _Odd("the answer's status is none")
        self._informational = 100 <= status < 200
        if self._informational:
            return
        self._headed = True
        self._status = status
        self._undigested = 0
        self._keep_alive = self._parser.should_keep_alive()
        if not self._lingering and self._late is None:
            self.due = self._total_at
        if self._head is not None and not self._head.done():
            self._head.set_result(Response(self, status, self._headers))
        if self._bodiless:
            self._keep_alive = False
            self._complete_now()

    def on_body(self, body: bytes) -> None:
        self._undigested = 0
        self._bodied = True
        if self._lingering:
            self.close()
        elif not self._complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._informational:
            self._informational = False
            return
        if not self._complete:
            self._complete_now()

    # the rest

    def _complete_now(self) -> None:
        self._complete = True
        self.due = self._total_at = NEVER
        if self._end is not None and not self._end.done():
            self._end.set_result(None)
        if self._lingering:
            self.close()
        elif self._late is not None:
            self._late(Response(self, self._status, self._headers), self._taken())
            self.close()

    def _check_coding(self, value: bytes) -> None:
        """Refuse a body whose coding we would have to undo; without a TE header nobody may send one."""
        if value.lower() != b"chunked" or first(self._headers, b"transfer-encoding") is not None:
            raise _Odd("only the chunked Transfer-Encoding is supported")

    def _ends_with_connection(self) -> bool:
        """Whether the body under way is of the kind that ends when the connection does."""
        return first(self._headers, b"content-length") is None and first(self._headers, b"transfer-encoding") is None

    def _break(self, message: str) -> None:
        if self._complete:
            # The answer is whole and stays good; what came after it is not.
            self._keep_alive = False
            self.close()
        else:
            self._fail(Broken(message, began=self._began, reused=self.requests > 1))

    def _fail(self, error: ClientError) -> None:
        self._keep_alive = False
        self._error = error
        self._complete = True
        for future in (self._head, self._end):
            if future is not None and not future.done():
                future.set_exception(error)
        if self._on_broken is not None:
            self._on_broken(error)
        self.close()
