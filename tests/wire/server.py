"""A server under test and a raw socket to it: what is sent is what stands in the test, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from baton.http import Limits, Request, Responder, Server


@dataclass
class Wire:
    """A listening server and what its handler has seen."""

    port: int
    server: Server
    seen: list[Request] = field(default_factory=list)

    async def talk(self, pieces: Iterable[bytes], seconds: float = 10.0) -> bytes:
        """Send the pieces one by one, and give everything that comes back until the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            async with asyncio.timeout(seconds):
                return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


async def echo(request: Request, responder: Responder) -> None:
    """Answers with what was understood."""
    text = b"%b %b %b" % (request.method.encode(), request.target, request.body)
    responder.send(200, [(b"content-type", b"text/plain")], text)


@contextlib.asynccontextmanager
async def wire(
    handler: Callable[[Request, Responder], Awaitable[None]] = echo, limits: Limits | None = None
) -> AsyncIterator[Wire]:
    seen: list[Request] = []

    async def noting(request: Request, responder: Responder) -> None:
        seen.append(request)
        await handler(request, responder)

    server = Server(noting, limits)
    ((_, port),) = await server.listen("127.0.0.1", 0)
    try:
        yield Wire(port, server, seen)
    finally:
        await server.close()
