"""Ending a cluster from outside: through its supervisor when that runs, else process by process, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping

from baton.launch.errors import LaunchError
from baton.launch.leftovers import session_alive
from baton.launch.operate import Say
from baton.launch.record import ClusterRecord, ProcessRecord, forget, holding, runs, strays
from baton.launch.supervisor import STOP_SECONDS, end_session

LOOK_SECONDS = 0.05
LOCK_SECONDS = 2.0
SUPERVISOR_SECONDS = 30.0
"""Longer than a supervisor may take to end what it started."""


async def take_down(record: ClusterRecord, say: Say, environ: Mapping[str, str] = os.environ) -> None:
    """End everything that belongs to *record*, and forget it.

    Raises:
        LaunchError: something is still running, or somebody else starts or ends it.
    """
    if runs(record.supervisor):
        say(f"asking the supervisor (pid {record.supervisor.pid}) to stop")
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.supervisor.pid, signal.SIGTERM)
        if not await _gone(record.supervisor, SUPERVISOR_SECONDS):
            say(f"it is still there after {SUPERVISOR_SECONDS:g} s: killing it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.supervisor.pid, signal.SIGKILL)
            await _gone(record.supervisor, STOP_SECONDS)
    with holding(record.name, environ, LOCK_SECONDS):
        await end_left(record, say, environ)


async def end_left(record: ClusterRecord, say: Say, environ: Mapping[str, str] = os.environ) -> None:
    """The same where its supervisor is gone, for who is holding its name.

    Raises:
        LaunchError: something is still running.
    """
    left = {each.pid: each.name for each in record.alive}
    # Also what a supervisor started that was killed before it could write that down.
    left |= {pid: f"the session {pid}" for pid in strays(record.run, frozenset(left))}
    if left:
        say(f"stopping {', '.join(left.values())}")
        await asyncio.gather(*(end_session(pid, STOP_SECONDS) for pid in left))
    still = [name for pid, name in left.items() if session_alive(pid)]
    if still or strays(record.run):
        raise LaunchError(f"still running: {', '.join(still) or 'what they started'}; try again")
    shutil.rmtree(record.scratch, ignore_errors=True)
    forget(record, environ)


async def _gone(process: ProcessRecord, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while runs(process):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(LOOK_SECONDS)
    return True
