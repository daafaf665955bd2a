"""Both sides' protocol objects without sockets or a loop: what goes in, when handlers run, and what comes out.

Thousands of byte streams a second, each cut as the test likes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, cast

from baton.http import ClientError, Limits, Request, Responder, Response
from baton.http.client_connection import ClientConnection
from baton.http.connection import Connection
from baton.http.outbox import Outbox
from baton.http.server import plain_refusal


class Socket:
    """A transport that keeps what is written, and takes it all at once.

    Attributes:
        sent: everything written so far.
        unsent: what :meth:`get_write_buffer_size` tells.
        reading: whether the protocol wants more.
        ended: whether the writing side was shut.
    """

    def __init__(self) -> None:
        self.sent = bytearray()
        self.unsent = 0
        self.reading = True
        self.ended = False
        self.closed = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        assert not self.closed and not self.ended
        self.sent += data

    def write_eof(self) -> None:
        self.ended = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        """It is no real one."""

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Job:
    """A task that runs when the desk says so."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self.work = work

    def cancel(self) -> None:
        self.work.close()


class Desk:
    """A server of one connection. Handlers don't await, and run when :meth:`work` is called."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.refusal = plain_refusal
        self.connections: set[Connection] = set()
        self.outbox = Outbox()
        self.busy = 0
        self.seen: list[Request] = []
        self.jobs: deque[Job] = deque()
        self.now = 0.0
        self.socket = Socket()
        self.connection = Connection(cast(Any, self))
        self.connection.connection_made(cast(Any, self.socket))

    @property
    def loop(self) -> Any:
        return self

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()

    def create_task(self, work: Coroutine[Any, Any, None]) -> Any:
        self.jobs.append(Job(work))
        return self.jobs[-1]

    async def handler(self, request: Request, responder: Responder) -> None:
        self.seen.append(request)
        responder.send(200, [], b"%b %b %b" % (request.method.encode(), request.target, request.body))

    def check_drained(self) -> None: ...

    def work(self) -> None:
        """Run the handlers that are due, and those that follow from them."""
        while self.jobs:
            job = self.jobs.popleft()
            try:
                job.work.send(None)
            except StopIteration:
                continue
            raise AssertionError("a handler here must not wait")

    def feed(self, pieces: Iterable[bytes], *, at_once: bool = True) -> None:
        """Bring the pieces in; handlers run after each, or only after the last."""
        for piece in pieces:
            if not self.socket.closed:
                self.connection.data_received(piece)
            if at_once:
                self.work()
        self.work()


class Call:
    """One request on a client's connection: what has come of its response.

    Attributes:
        body: so far.
        error: what it ended with, if it broke.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, head: bool = False) -> None:
        self.socket = Socket()
        self.connection = ClientConnection(loop, Outbox(), lambda _: None)
        self.connection.connection_made(cast(Any, self.socket))
        self._head = self.connection.send((b"",), bodiless=head)
        self._reading: Coroutine[Any, Any, bytes] | None = None
        self._awaited: asyncio.Future[None] | None = None
        self.response: Response | None = None
        self.body: bytes | None = None
        self.error: ClientError | None = None

    def feed(self, pieces: Iterable[bytes]) -> None:
        for piece in pieces:
            if not self.socket.closed:
                self.connection.data_received(piece)
        self._look()

    def end(self) -> None:
        """The server hangs up."""
        if not self.socket.closed:
            self.connection.eof_received()
        self._look()

    def _look(self) -> None:
        if self.body is not None or self.error is not None or not self._head.done():
            return
        if self._awaited is not None and not self._awaited.done():
            return
        try:
            if self._reading is None:
                self.response = self._head.result()
                self._reading = self.response.read()
            self._awaited = self._reading.send(None)
        except StopIteration as done:
            self.body = done.value
        except ClientError as error:
            self.error = error
