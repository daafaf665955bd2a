"""A process that is short of file descriptors; `test_descriptors.py` runs it.

usage: python -m tests.wire.starved (asyncio | uvloop) (server | client | unix-client)
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from baton.http import Origin, OutOfDescriptors, Pool, Request, Responder, Server, Timeouts

SPARE = 8


def starve(spare: int) -> None:
    """Let this process open *spare* more descriptors."""
    used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1  # noqa: PTH208
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, hard))


async def cpu(request: Request, responder: Responder) -> None:
    responder.send(200, [], b"%f" % time.process_time())


async def serve() -> None:
    """Listens, says where, and answers with the CPU seconds it has used, until its input ends."""
    server = Server(cpu)
    ((_, port),) = await server.listen("127.0.0.1", 0)
    starve(SPARE)
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def answer(request: Request, responder: Responder) -> None:
    responder.send(200, [], b"hello")


async def ask(*, unix: bool) -> None:
    """Prints what a request gives: with descriptors, without, and with some again."""
    with tempfile.TemporaryDirectory() as folder:
        server = Server(answer)
        if unix:
            path = str(Path(folder) / "socket")
            await server.listen_unix(path)
            origin = Origin("localhost", 0, path=path)
        else:
            ((_, port),) = await server.listen("127.0.0.1", 0)
            origin = Origin("127.0.0.1", port)
        pools = [Pool(origin, Timeouts()) for _ in range(3)]
        for pool, spare in zip(pools, (100, 0, 100), strict=True):
            taken = []
            starve(spare)
            if not spare:
                try:
                    while True:
                        taken.append(socket.socket())
                except OSError:
                    pass
            try:
                async with pool.request(b"GET", b"/", ()) as response:
                    print((await response.read()).decode())
            except OutOfDescriptors as error:
                print(f"{type(error).__name__}: {error}; {pool.size} open")
            for each in taken:
                each.close()
        for pool in pools:
            pool.close()
        await server.close()


if __name__ == "__main__":
    factory = uvloop.new_event_loop if sys.argv[1] == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve() if sys.argv[2] == "server" else ask(unix=sys.argv[2] == "unix-client"))
