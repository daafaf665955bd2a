"""Several processes that are one proxy: they share a port, and what they count adds up."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from baton.http import ClientError, Origin, Pool, Timeouts

logger = logging.getLogger("baton.proxy")

ASK_SECONDS = 2.0
FORWARD_SECONDS = 10.0
RESTART_SECONDS = 1.0
FORK = multiprocessing.get_context("fork")


class Peers:
    """The other workers of this proxy.

    Args:
        paths: the Unix sockets on which they tell what they count.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._pools = [Pool(Origin("worker", 0, path=path), Timeouts(connect=ASK_SECONDS)) for path in paths]

    async def ask(self, path: str, *, quiet: bool = False) -> list[bytes]:
        """What each says at *path*; one that doesn't answer is left out.

        Args:
            quiet: whether that is nothing to be logged: it may not be up yet.
        """
        found = await asyncio.gather(*(self._send(pool, b"GET", path, quiet=quiet) for pool in self._pools))
        return [body for status, body in found if status == 200]

    async def tell(self, path: str, body: bytes) -> None:
        """Tell each something in JSON."""
        await asyncio.gather(*(self._send(pool, b"POST", path, body) for pool in self._pools))

    async def forward(self, method: str, target: bytes, body: bytes) -> tuple[int, bytes]:
        """Have the only one answer a request; status 0 when it does not."""
        (pool,) = self._pools
        return await self._send(pool, method.encode(), target.decode("latin-1"), body, FORWARD_SECONDS)

    async def _send(
        self,
        pool: Pool,
        method: bytes,
        path: str,
        body: bytes = b"",
        seconds: float = ASK_SECONDS,
        *,
        quiet: bool = False,
    ) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(seconds),
                pool.request(method, path.encode("latin-1"), (), (body,) if body else ()) as response,
            ):
                return response.status, await response.read()
        except (ClientError, TimeoutError) as error:
            if not quiet:
                logger.warning("another worker of this proxy does not answer: %s", str(error) or "too slow")
            return 0, b""

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def reserve(host: str, port: int) -> socket.socket:
    """A socket that holds *port* for workers to share (0: any free one); it does not listen.

    Raises:
        OSError: somebody has it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Sharing a port would also succeed with a stranger's workers: ask for it alone first.
    with socket.socket(family, socket.SOCK_STREAM) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        alone.bind((host, port))
        alone.listen(1)
        port = alone.getsockname()[1]
    shared = socket.socket(family, socket.SOCK_STREAM)
    try:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind((host, port))
    except OSError:
        shared.close()
        raise
    return shared


Alive = Connection
"""Can be read from when the process at its other end is gone."""


@dataclass(frozen=True)
class Worker:
    """What one worker is told.

    Attributes:
        port: which all share.
        socket: the path on which it tells the others what it counts.
        others: theirs.
        first: the path of the first one, which does what is to be done once; None in that one itself.
        alive: can be read from when the process that started the workers is gone.
        ready: to be called when it listens.
    """

    port: int
    socket: str
    others: tuple[str, ...]
    first: str | None
    alive: Alive
    ready: Callable[[], None]


Work = Callable[[Worker], None]
"""What a worker does until SIGTERM."""


class Workers:
    """Starts workers, starts again one that dies, and stops all when it is told to or dies itself.

    Args:
        count: how many.
        work: what each runs, in a process of its own.
        passes_hangup: whether the first of them is given SIGHUP.
    """

    def __init__(self, count: int, work: Work, *, passes_hangup: bool = False) -> None:
        self._count = count
        self._work = work
        self._passes_hangup = passes_hangup
        self._running: dict[int, multiprocessing.process.BaseProcess] = {}
        self._started: dict[int, float] = {}
        self._stopping = False
        # Its end in the workers closes when this process is gone, however it went.
        self._alive_read, self._alive_write = FORK.Pipe(duplex=False)
        self._wake_read, self._wake_write = FORK.Pipe(duplex=False)

    def run(self, host: str, port: int, on_ready: Callable[[int], None]) -> int:
        """Run until SIGINT or SIGTERM; the exit code.

        Raises:
            OSError: the port cannot be had.
        """
        with reserve(host, port) as shared, tempfile.TemporaryDirectory(prefix="baton-proxy-") as folder:
            self._port = int(shared.getsockname()[1])
            self._paths = [str(Path(folder) / f"{number}.sock") for number in range(self._count)]
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
            if self._passes_hangup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            ready = [self._start(number) for number in range(self._count)]
            came_up = all(self._await_ready(each) for each in ready)
            if came_up:
                if self._passes_hangup:
                    signal.signal(signal.SIGHUP, self._on_signal)
                on_ready(self._port)
            elif not self._wake_read.poll():
                self._stop()
                self._reap_all()
                return 1
            self._watch()
            return 0

    def _on_signal(self, number: int, _: object) -> None:
        with suppress(OSError):
            self._wake_write.send_bytes(b"%d" % number)

    def _start(self, number: int) -> Connection:
        ready_read, ready_write = FORK.Pipe(duplex=False)
        process = FORK.Process(target=self._in_worker, args=(number, ready_write), name=f"worker-{number}")
        process.start()
        ready_write.close()
        self._running[number] = process
        self._started[number] = time.monotonic()
        return ready_read

    def _await_ready(self, ready: Connection) -> bool:
        """Whether a worker came up; False as well when a stop was asked for meanwhile."""
        found = wait([ready, self._wake_read])
        if self._wake_read in found:
            return False
        with ready:
            try:
                ready.recv_bytes()
            except EOFError:
                return False
        return True

    def _in_worker(self, number: int, ready: Connection) -> None:
        self._alive_write.close()
        # An interrupt from a terminal comes to all; the one who started the workers passes it on.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._passes_hangup:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        path, others = self._paths[number], tuple(each for each in self._paths if each != self._paths[number])
        Path(path).unlink(missing_ok=True)
        first = self._paths[0] if number else None
        self._work(Worker(self._port, path, others, first, self._alive_read, lambda: ready.send_bytes(b"ready")))

    def _watch(self) -> None:
        """Until all have stopped."""
        while self._running:
            sentinels = {process.sentinel: number for number, process in self._running.items()}
            for found in wait([*sentinels, self._wake_read]):
                if found is self._wake_read:
                    if int(self._wake_read.recv_bytes()) == signal.SIGHUP:
                        self._hang_up()
                    else:
                        self._stop()
                    continue
                number = sentinels[found]  # type: ignore[index]
                process = self._running.pop(number)
                process.join()
                if self._stopping:
                    continue
                logger.error("worker %d of the proxy ended with %s and is started again", number, process.exitcode)
                time.sleep(max(0.0, RESTART_SECONDS - (time.monotonic() - self._started[number])))
                self._start(number).close()

    def _hang_up(self) -> None:
        """Pass SIGHUP to the first worker, which reads files for all."""
        first = self._running.get(0)
        if first is not None and first.pid is not None:
            os.kill(first.pid, signal.SIGHUP)

    def _stop(self) -> None:
        """Told once: finish; told again: the workers cut what is open."""
        self._stopping = True
        for process in self._running.values():
            process.terminate()

    def _reap_all(self) -> None:
        for process in self._running.values():
            process.join()


def watch_parent(alive: Alive, on_gone: Callable[[], None]) -> None:
    """Have the running loop call *on_gone* when the process that started the workers is gone."""
    loop = asyncio.get_running_loop()

    def gone() -> None:
        loop.remove_reader(alive.fileno())
        on_gone()

    loop.add_reader(alive.fileno(), gone)
