"""One client's connection: requests parsed strictly and one by one, answers written in order and within bounds.

A request is read whole, then its handler runs as a task; the next request of the connection waits. An
answer is written as it comes; a client that is slow pauses whoever feeds it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

import httptools

from baton.http.messages import Header, Request, head, status_line
from baton.http.outbox import Outbox
from baton.http.responder import Responder
from baton.http.rules import Limits, Refused, check_head, is_path, origin_form

logger = logging.getLogger("baton.http")

LINGER_SECONDS = 2.0
NEVER = float("inf")

Handler = Callable[[Request, Responder], Awaitable[None]]
Refusal = Callable[[int, str], tuple[bytes, bytes]]
"""From a status and a reason to the content type and body of a refusal."""


class Host(Protocol):
    """What a connection asks of the server that it belongs to.

    Attributes:
        handler, limits, refusal: the server's.
        connections: those that are open; each adds and removes itself.
        outbox: through which all of them write.
        busy: handlers that are running.
    """

    handler: Handler
    limits: Limits
    refusal: Refusal
    connections: set[Connection]
    outbox: Outbox
    busy: int

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Where handlers run."""

    def check_drained(self) -> None:
        """Called when a connection has ended."""


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(self, server: Host) -> None:
        # for as long as the server
        self._server = server
        self._limits = server.limits
        # for as long as the connection
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._responder: Responder | None = None
        self._refused: Refused | None = None
        self._closing = False
        self._reading = True
        self._unsent = 0
        self.deadline = NEVER
        self.write_paused = False
        # for as long as a request is being read
        self._begun = False
        self._request: Request | None = None
        self._target = b""
        self._headers: list[Header] = []
        self._head_bytes = 0
        self._undigested = 0
        self._pieces: list[bytes] = []
        self._body_bytes = 0
        self._owes_continue = False

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
        # time and memory, so that leaving is what is assumed, as nginx does. The handler isn't left to wait for
        # connection_lost: that comes only when what was written has gone out.
        self._closing = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        elif self._transport is not None and not self._transport.is_closing():
            self._end()
        return False

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._undigested += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserCallbackError, httptools.HttpParserError) as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Refused) else Refused(400, "the request is not valid HTTP/1.1"))
            return
        if self._undigested > self._limits.head_bytes:
            # The parser keeps half a header to itself, however long it grows.
            self._refuse(self._head_too_long())
        elif self._begun and self._task is None and self.deadline == NEVER:
            # Only now, since most requests come whole and need no clock.
            self._arm(self._limits.head_seconds)

    def pause_writing(self) -> None:
        self.write_paused = True
        self._watch_unsent()
        if self._responder is not None and self._responder.on_pause is not None:
            self._responder.on_pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._responder is not None:
            self._disarm()
            if self._responder.on_resume is not None:
                self._responder.on_resume()
        elif self._transport is not None and not self._transport.is_closing():
            self._go_on()

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._begun = True
        self._target = b""
        self._headers = []
        self._head_bytes = 0
        self._undigested = 0
        self._pieces = []
        self._body_bytes = 0
        self._owes_continue = False
        if self._task is None and not self.write_paused:
            self.deadline = NEVER

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._head_bytes += len(url)
        if self._head_bytes > self._limits.head_bytes:
            raise self._head_too_long()

    def on_header(self, name: bytes, value: bytes) -> None:
        limits, headers = self._limits, self._headers
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > limits.head_bytes:
            raise self._head_too_long()
        if self._request is not None:
            # A trailer: whoever checked the head has not seen it, so that nobody may take it for a header.
            return
        if len(headers) >= limits.headers:
            raise Refused(431, f"more than {limits.headers} headers")
        # Blanks after a value are none of it (RFC 9112, 5.1); the parser takes away only those before it.
        headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Refused(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        if self._parser.should_upgrade():
            # What follows would not be HTTP/1.1, whoever sends it.
            raise Refused(501, "tunnels and protocol upgrades are not supported")
        method, target = self._parser.get_method().decode(), self._target
        request = Request(
            method,
            target if is_path(target) else origin_form(method, target),
            self._headers,
            http_1_0=version == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )
        expect = check_head(request, self._limits)
        self._request = request
        self._undigested = 0
        if expect is not None and not request.http_1_0:
            if expect.lower() != b"100-continue":
                raise Refused(417, "only 100-continue can be expected")
            self._owes_continue = True
            if self._task is None and not self._waiting:
                self._continue()

    def on_body(self, body: bytes) -> None:
        self._undigested = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._limits.body_bytes:
            raise Refused(413, f"the body is over {self._limits.body_bytes} bytes")
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        request, self._request = self._request, None
        assert request is not None
        request.body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces = []
        self._begun = False
        self._undigested = 0
        self._waiting.append(request)
        if self._task is None and not self.write_paused:
            self.deadline = NEVER
            self._next()
            return
        self._waiting_bytes += len(request.body)
        if len(self._waiting) >= self._limits.pipelined or self._waiting_bytes >= self._limits.body_bytes:
            self._pause_reading()

    # the rest

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._server.outbox.write(self._transport, (data,), self._server.busy)

    def soon(self, callback: Callable[[], None]) -> None:
        self._server.loop.call_soon(callback)

    def abort(self, *, reset: bool = False) -> None:
        if self._transport is None:
            return
        if reset and (sock := self._transport.get_extra_info("socket")) is not None:
            # A socket that does not linger is closed by a reset.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()

    def close_when_idle(self) -> None:
        """Take no more requests; close when what is under way is answered."""
        self._closing = True
        self._waiting.clear()
        if self._task is None and self._transport is not None and not self._transport.is_closing():
            self._end()

    def late(self) -> None:
        """Called by the server's sweep once the deadline has passed."""
        transport = self._transport
        assert transport is not None
        self._disarm()
        if self.write_paused or transport.is_closing():
            left = transport.get_write_buffer_size()
            if left < self._unsent:
                self._watch_unsent()
            else:
                self.abort()
        elif self._begun and not self._closing:
            self._refuse(Refused(408, "the request did not arrive in time"))
        else:
            self._end()

    def _head_too_long(self) -> Refused:
        return Refused(431, f"the head is over {self._limits.head_bytes} bytes")

    def _continue(self) -> None:
        self._owes_continue = False
        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _next(self) -> None:
        request = self._waiting.popleft()
        self._responder = Responder(self, request)
        self._task = self._server.loop.create_task(self._run(request, self._responder))
        if self._waiting_bytes:
            self._waiting_bytes = sum(len(each.body) for each in self._waiting)
        if not self._reading and len(self._waiting) < self._limits.pipelined:
            self._resume_reading()

    async def _run(self, request: Request, responder: Responder) -> None:
        """One handler; whatever it leaves open is closed here."""
        self._server.busy += 1
        try:
            await self._server.handler(request, responder)
        except asyncio.CancelledError:
            # The client has left, or the server gives up waiting: nobody reads an answer.
            self.abort()
        except Exception:
            logger.exception("a handler failed on %s", request.path)
            self._finish(responder)
        else:
            if not responder.ended:
                logger.error("a handler left %s without a whole answer", request.path)
                self._finish(responder)
        self._server.busy -= 1
        self._done(request)

    def _finish(self, responder: Responder) -> None:
        """End what a handler did not: 500 when nothing was said, else a cut, which nobody takes for the end."""
        if not responder.started and not responder.ended:
            kind, body = self._server.refusal(500, "internal error")
            responder.send(500, [(b"content-type", kind)], body)
        elif not responder.ended:
            responder.abort()

    def _done(self, request: Request) -> None:
        self._task = None
        self._responder = None
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if not request.keep_alive:
            self._end()
        elif not self.write_paused:
            self._go_on()

    def _go_on(self) -> None:
        """Nothing is under way and the client keeps up: what comes now."""
        if self._waiting:
            self._disarm()
            self._next()
        elif self._refused is not None:
            self._answer_refused(self._refused)
        elif self._closing:
            self._end()
        elif self._begun:
            self._arm(self._limits.head_seconds)
            if self._owes_continue:
                self._continue()
        else:
            self._arm(self._limits.idle_seconds)

    def _refuse(self, refused: Refused) -> None:
        """Answer for the handler, after what came before, and close: what follows cannot be trusted."""
        self._closing = True
        self._refused = refused
        if not self.write_paused:
            self._disarm()
        if self._task is None and not self._waiting:
            self._answer_refused(refused)

    def _answer_refused(self, refused: Refused) -> None:
        assert self._transport is not None
        kind, body = self._server.refusal(refused.status, refused.reason)
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.write(head(status_line(refused.status), headers) + body)
        self._server.outbox.flush()
        if self._transport.can_write_eof():
            # A socket that is closed with unread bytes is reset, and the answer with it (RFC 9112, 9.6): the client
            # gets a while to read it and to hang up.
            self._transport.write_eof()
            self._arm(LINGER_SECONDS)
        else:
            self._end()

    def _end(self) -> None:
        """Close once what was written has gone out; a client that does not take it is cut off by :meth:`late`."""
        assert self._transport is not None
        self._closing = True
        self._server.outbox.flush()
        self._watch_unsent()
        self._transport.close()

    def _watch_unsent(self) -> None:
        assert self._transport is not None
        self._unsent = self._transport.get_write_buffer_size()
        self._arm(self._limits.stall_seconds)

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
        self.deadline = NEVER
