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
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from baton.launch.commands import Command
from baton.launch.leftovers import session_alive, shared_memory_of
from baton.launch.phases import STARTING, phase_of, reason_of

POLL_SECONDS = 0.2
STOP_SECONDS = 8.0
LAST_LINES = 12

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
        reason = reason_of(lines) or (lines[-1].strip() if lines else "it said nothing")
        super().__init__(f"{name} died while {phase} ({how}): {reason} [log: {log}]")
        self.name = name
        self.code = code
        self.last_lines = lines[-LAST_LINES:]


class StartTimeout(RuntimeError):
    """A child did not answer in time."""


@dataclass
class Child:
    """A process that we started.

    Attributes:
        name: for people.
        log: where its output goes.
        probe: asks whether it is ready.
        phase: what it is doing.
        ready_after: seconds from its start to its first good answer.
    """

    name: str
    process: asyncio.subprocess.Process
    log: Path
    probe: Probe
    started: float
    phase: str = STARTING
    ready_after: float | None = None
    read_to: int = 0
    phases: list[tuple[str, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.ready_after if self.ready_after is not None else time.monotonic() - self.started


class Supervisor:
    """The children of one `baton up`.

    Args:
        logs: the folder for their logs, made when missing.

    Use as an async context manager: leaving it, by whatever way, stops every child and removes
    what they left in shared memory and in the scratch folder.
    """

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.children: list[Child] = []
        self._scratch: Path | None = None

    async def __aenter__(self) -> Supervisor:
        self.logs.mkdir(parents=True, exist_ok=True)
        # Short, since it holds Unix sockets, whose paths may have 107 bytes.
        self._scratch = Path(tempfile.mkdtemp(prefix="baton-"))
        return self

    async def __aexit__(self, *_: object) -> None:
        # Shielded: a second Ctrl-C must not leave half of them running.
        await asyncio.shield(self.stop())

    async def start(self, name: str, command: Command, probe: Probe, first_phase: str = STARTING) -> Child:
        """Start one process; its output goes to ``<name>.log``."""
        assert self._scratch is not None, "enter the supervisor first"
        log = self.logs / f"{name}.log"
        with log.open("wb") as sink:
            process = await asyncio.create_subprocess_exec(
                *command.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sink,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **self._scratch_environ(), **command.environ},
                start_new_session=True,
            )
        child = Child(name, process, log, probe, time.monotonic(), first_phase)
        self.children.append(child)
        return child

    def _scratch_environ(self) -> Mapping[str, str]:
        scratch = str(self._scratch)
        return {"TMPDIR": scratch, "VLLM_RPC_BASE_PATH": scratch, "PYTHONUNBUFFERED": "1"}

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
            for child in waiting:
                _read_phase(child)
            answers = await asyncio.gather(*(child.probe() for child in waiting))
            for child, ready in zip(waiting, answers, strict=True):
                if ready:
                    child.ready_after = time.monotonic() - child.started
                    child.phase = "ready"
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

    def check_alive(self) -> None:
        """Raise ChildDied when a child has ended."""
        for child in self.children:
            if child.process.returncode is not None:
                _read_phase(child)
                raise ChildDied(child.name, child.process.returncode, child.phase, child.log)

    async def stop(self) -> None:
        """End every child with all that it forked, and remove what they leave; can be called again."""
        children, self.children = self.children, []
        segments = [segment for child in children for segment in shared_memory_of(child.process.pid)]
        for child in children:
            _signal(child, signal.SIGTERM)
        ends = [_gone(child) for child in children]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), STOP_SECONDS)
        for child in children:
            _signal(child, signal.SIGKILL)
        await asyncio.gather(*(child.process.wait() for child in children))
        for segment in segments:
            segment.unlink(missing_ok=True)
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)


async def _gone(child: Child) -> None:
    """Wait until the child and everything in its session has ended."""
    await child.process.wait()
    while session_alive(child.process.pid):
        await asyncio.sleep(0.05)


def _signal(child: Child, number: signal.Signals) -> None:
    """TERM goes to the leader, which ends its own children in order; all else to the whole session."""
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGTERM and child.process.returncode is None:
            os.kill(child.process.pid, number)
        else:
            os.killpg(child.process.pid, number)


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
