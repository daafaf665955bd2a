"""Starts the processes of a cluster, watches them until all answer, and stops every one of them.

The only owner of child processes. A child leads a session of its own, so that whatever it
forks can be reached and ended with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.launch.commands import Command
from baton.launch.leftovers import session_alive, shared_memory_of
from baton.launch.phases import STARTING, phase_of, reason_of
from baton.launch.record import RUN, ProcessRecord, strays

POLL_SECONDS = 0.2
STOP_SECONDS = 8.0
HASTY_SECONDS = 0.5
ORPHAN_SECONDS = 1.0
"""How long what a child forked may outlive it."""
LAST_LINES = 12
SOCKET_PATH_BYTES = 107

READY = "ready"
UNKNOWN_CODE = 256
"""In an exit code's place, of a process that is no child of ours; no process has it."""

Probe = Callable[[], Awaitable[bool]]


class ChildDied(RuntimeError):
    """A child ended by itself.

    Attributes:
        name: whose it was.
        code: its exit code, negative for a signal.
        last_lines: the end of its log.
    """

    def __init__(self, name: str, code: int, phase: str, log: Path) -> None:
        lines = _tail(log, 200)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        how = "its exit code is its former parent's" if code == UNKNOWN_CODE else how
        last = lines[-1].strip() if lines and 0 < code < UNKNOWN_CODE else "nothing in its log says why"
        reason = reason_of(lines) or last
        super().__init__(f"{name} died while {phase} ({how}): {reason} [log: {log}]")
        self.name = name
        self.code = code
        self.last_lines = lines[-LAST_LINES:]


class StartTimeout(RuntimeError):
    """A child did not answer in time."""


class Adopted:
    """A process that is no child of ours, as asyncio shows one that is."""

    def __init__(self, pid: int) -> None:
        """
        Raises:
            ProcessLookupError: it has ended.
        """
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[int] = self._loop.create_future()
        # It can be read once the process has ended.
        self._loop.add_reader(self._descriptor, self._on_end)

    async def wait(self) -> int:
        return await asyncio.shield(self._end)

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.returncode = UNKNOWN_CODE
        self._end.set_result(UNKNOWN_CODE)


@dataclass(eq=False)
class Child:
    """A process that we started.

    Attributes:
        name: for people.
        log: where its output goes.
        probe: asks whether it is ready.
        phase: what it is doing.
        ready_after: seconds from its start to its first good answer.
        boots: how often it was started.
        ending: ends it with all that it forked; None as long as nobody wants that.
    """

    name: str
    process: asyncio.subprocess.Process | Adopted
    log: Path
    probe: Probe
    started: float
    phase: str = STARTING
    ready_after: float | None = None
    read_to: int = 0
    boots: int = 1
    phases: list[tuple[str, float]] = field(default_factory=list)
    ending: asyncio.Task[None] | None = None

    @property
    def seconds_ready(self) -> float:
        """How long it has served."""
        return 0.0 if self.ready_after is None else time.monotonic() - self.started - self.ready_after

    @property
    def seconds(self) -> float:
        return self.ready_after if self.ready_after is not None else time.monotonic() - self.started


class Supervisor:
    """The children of one `baton up`.

    Args:
        logs: the folder for their logs, made when missing.
        run: what marks all of them (:data:`baton.launch.record.RUN`).
        scratch: the folder of one that has gone, when its children are taken over.

    Attributes:
        children: those that run, and those that have ended or are being ended until nothing is left of them.

    Use as an async context manager: leaving it, by whatever way, stops every child and removes
    what they left in shared memory and in the scratch folder.
    """

    def __init__(self, logs: Path, run: str = "", scratch: Path | None = None) -> None:
        self.logs = logs
        self.run = run
        self.children: list[Child] = []
        self._scratch = scratch

    async def __aenter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        if self._scratch is None:
            self._scratch = make_scratch(tempfile.gettempdir())
        return self

    async def __aexit__(self, *_: object) -> None:
        # Shielded: a second Ctrl-C must not leave half of them running.
        await asyncio.shield(self.stop())

    @property
    def scratch(self) -> Path:
        """Its folder for sockets and temporary files."""
        assert self._scratch is not None, "enter the supervisor first"
        return self._scratch

    async def start(
        self, name: str, command: Command, probe: Probe, first_phase: str = STARTING, boots: int = 1
    ) -> Child:
        """Start one process; its output goes to ``<name>.log``, after what is there when it was started before."""
        log = self.logs / f"{name}.log"
        if boots == 1:
            log.unlink(missing_ok=True)
        read_to = log.stat().st_size if log.exists() else 0
        # To be appended to: a log that was cut short is written on from its new end.
        with log.open("ab") as sink:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._scratch_environ(), **command.environ},
                start_new_session=True,
            )
        child = Child(name, process, log, probe, time.monotonic(), first_phase, read_to=read_to, boots=boots)
        self.children.append(child)
        return child

    def adopt(self, process: ProcessRecord, probe: Probe) -> Child:
        """Watch a process that another supervisor has started.

        Raises:
            ProcessLookupError: it has ended.
        """
        since = time.monotonic() - (time.time() - process.created)
        child = Child(process.name, Adopted(process.pid), process.log, probe, since, boots=process.boots)
        child.read_to = process.log.stat().st_size if process.log.exists() else 0
        if process.served:
            child.phase, child.ready_after = READY, 0.0
        self.children.append(child)
        return child

    def end(self, child: Child, grace: float | None = None) -> asyncio.Future[None]:
        """End one child with all that it forked; whoever watches does not take it for one that died.

        It has begun once this returns, and is done once what is returned is. It goes on when whoever waits for that is
        cancelled; who asks again waits for the same end.
        """
        if child.ending is None:
            child.ending = asyncio.create_task(self._end(child, STOP_SECONDS if grace is None else grace))
        return asyncio.shield(child.ending)

    async def _end(self, child: Child, grace: float) -> None:
        await _end(child.process.pid, child.process, grace)
        self.children.remove(child)

    def child(self, name: str) -> Child | None:
        return next((each for each in self.children if each.name == name), None)

    def _scratch_environ(self) -> Mapping[str, str]:
        scratch = str(self._scratch)
        return {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch, "PYTHONUNBUFFERED": "1", RUN: self.run}

    async def until_ready(self, deadline_seconds: float, on_change: Callable[[], None] = lambda: None) -> None:
        """Wait until every child answers.

        Raises:
            ChildDied: one ended first; noticed within a second.
            StartTimeout: *deadline_seconds* passed; the message says who was doing what.
        """
        deadline = time.monotonic() + deadline_seconds
        while True:
            self.check_alive()
            waiting = [child for child in self.children if child.ready_after is None]
            if not waiting:
                return
            if time.monotonic() > deadline:
                who = ", ".join(f"{child.name} ({child.phase})" for child in waiting)
                raise StartTimeout(
                    f"not ready after {deadline_seconds:.0f} s: {who}. See the logs in {self.logs}, "
                    "or give more time with --start-timeout."
                )
            await asyncio.gather(*map(look_at, waiting))
            on_change()
            await asyncio.sleep(POLL_SECONDS)

    async def until_death(self) -> None:
        """Wait until a child ends by itself.

        Raises:
            ChildDied: always, in the end.
        """
        waits = [asyncio.ensure_future(child.process.wait()) for child in self.children]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self.check_alive()

    async def watching(self, work: Coroutine[Any, Any, None]) -> None:
        """Do *work* while all children live.

        Raises:
            ChildDied: one ended before *work* did.
        """
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self.until_death())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            (task if task.done() and not task.exception() else death if death.done() else task).result()
        finally:
            for each in (task, death):
                each.cancel()
            await asyncio.wait({task, death})

    def check_alive(self) -> None:
        """Raise ChildDied when a child has ended."""
        for child in self.ended():
            raise died(child)

    def ended(self) -> list[Child]:
        """Those that ended by themselves, and have not been seen to yet."""
        return [each for each in self.children if each.process.returncode is not None and each.ending is None]

    async def stop(self) -> None:
        """End every child with all that it forked, and remove what they leave; can be called again."""
        children = list(self.children)
        # Before everything answers there is no request to finish, and whoever waits wants the reason now.
        serving = all(child.ready_after is not None for child in children)
        grace = STOP_SECONDS if serving and all(map(_runs, children)) else HASTY_SECONDS
        await asyncio.gather(*(self.end(child, grace) for child in children))
        await self.sweep()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    async def sweep(self, known: frozenset[int] = frozenset()) -> None:
        """End what else belongs to the run, but for the sessions *known*, whoever started it."""
        if self.run:
            await asyncio.gather(*(end_session(group, HASTY_SECONDS) for group in strays(self.run, known)))


def died(child: Child) -> ChildDied:
    """What there is to say of a child that has ended."""
    assert child.process.returncode is not None
    _read_phase(child)
    return ChildDied(child.name, child.process.returncode, child.phase, child.log)


async def look_at(child: Child) -> None:
    """Bring up to date what *child* is doing, and whether it answers."""
    _read_phase(child)
    if await child.probe():
        child.ready_after = time.monotonic() - child.started
        child.phase = READY


def make_scratch(base: str) -> Path:
    """A new folder under *base* for temporary files and Unix sockets, or under /tmp when *base* is too long.

    A socket's path has at most 107 bytes, and vLLM names its sockets with 36.
    """
    base = base if len(os.fsencode(base)) <= SOCKET_PATH_BYTES - len("/baton-12345678/") - 36 else "/tmp"  # noqa: S108
    return Path(tempfile.mkdtemp(prefix="baton-", dir=base))


def _runs(child: Child) -> bool:
    return child.process.returncode is None


async def end_session(group: int, grace: float) -> None:
    """The same for the session *group* of another supervisor's child, whether its leader runs or not."""
    try:
        leader = Adopted(group)
    except ProcessLookupError:
        leader = None
    await _end(group, leader, grace)


async def _end(group: int, leader: asyncio.subprocess.Process | Adopted | None, grace: float) -> None:
    """End a whole session: its leader is asked first, all are killed after *grace* seconds, then cleaned up after."""
    segments = shared_memory_of(group)
    if leader is not None:
        with contextlib.suppress(ProcessLookupError):
            # The leader ends its own children in order; one that has gone cannot.
            leader.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(leader.wait(), grace)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_session_end(group), min(grace, ORPHAN_SECONDS))
    segments |= shared_memory_of(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    if leader is not None:
        await leader.wait()
    # A killed process is gone when the kernel says so, not when we asked.
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_session_end(group), STOP_SECONDS)
    for segment in segments:
        segment.unlink(missing_ok=True)


async def _session_end(group: int) -> None:
    while session_alive(group):
        await asyncio.sleep(0.02)


def _read_phase(child: Child) -> None:
    """Bring ``child.phase`` up to date with what its log says since we last looked."""
    with child.log.open("rb") as handle:
        handle.seek(child.read_to)
        fresh = handle.read()
    end = fresh.rfind(b"\n") + 1
    child.read_to += end
    for line in fresh[:end].decode(errors="replace").splitlines():
        phase = phase_of(line)
        if phase is not None and phase != child.phase:
            child.phase = phase
            child.phases.append((phase, time.monotonic() - child.started))


def _tail(log: Path, count: int) -> list[str]:
    with contextlib.suppress(OSError), log.open("rb") as handle:
        handle.seek(max(0, log.stat().st_size - 200_000))
        text = handle.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]
    return []
