"""HTTP/1.1 server on asyncio protocols: listens, looks after deadlines, stops. Knows nothing of LLMs."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl

from baton.http.connection import Connection, Handler, Refusal
from baton.http.outbox import Outbox
from baton.http.rules import Limits

SWEEP_SECONDS = 1.0
BACKLOG = 4096
# asyncio takes its backlog for the number of accepts in one go as well, and when descriptors run out it fails that
# often, each time with a log entry and a timer of its own. One at a time is one failure a second.
ACCEPTS_AT_ONCE = 1


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
        self.outbox = Outbox()
        self.busy = 0
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
        server = await self._loop.create_server(
            lambda: Connection(self),
            host,
            port,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limits.head_seconds,
            backlog=ACCEPTS_AT_ONCE,
            reuse_port=reuse_port or None,
        )
        self._begin(server)
        return [each.getsockname()[:2] for each in server.sockets]

    async def listen_unix(self, path: str) -> None:
        """Listen on a Unix socket.

        Raises:
            OSError: the path cannot be had.
        """
        self._loop = asyncio.get_running_loop()
        self._begin(await self._loop.create_unix_server(lambda: Connection(self), path, backlog=ACCEPTS_AT_ONCE))

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

    def check_drained(self) -> None:
        if self._drained is not None and not self.connections:
            self._drained.set()

    def _begin(self, server: asyncio.Server) -> None:
        self._servers.append(server)
        for each in server.sockets:
            # Through a copy, since what asyncio shows of its sockets cannot listen.
            with socket.socket(fileno=os.dup(each.fileno())) as listener:
                listener.listen(BACKLOG)
        self._sweep()

    def _sweep(self) -> None:
        """Look after deadlines once a second: a timer a request would cost more than it is worth."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        now = self.loop.time()
        for connection in [each for each in self.connections if each.deadline <= now]:
            connection.late()
        self._sweeping = self.loop.call_later(SWEEP_SECONDS, self._sweep)
