"""What a killed engine would leave behind: named shared memory, found while it still runs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

SHARED_MEMORY = "/dev/shm/"  # noqa: S108 (POSIX shared memory)


def shared_memory_of(group: int) -> set[Path]:
    """The named segments that the processes of session *group* have open or mapped."""
    found: set[Path] = set()
    for process in session_members(group):
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text(errors="replace")
            found |= {_path(line) for line in maps.splitlines() if SHARED_MEMORY in line}
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = descriptor.readlink()
                    if str(target).startswith(SHARED_MEMORY):
                        found.add(target)
    return {path for path in found if path.exists()}


def _path(line: str) -> Path:
    return Path(line[line.index(SHARED_MEMORY) :].removesuffix(" (deleted)"))


def session_members(group: int) -> list[int]:
    """The processes of session *group* that still run; a zombie waits for its parent only."""
    members = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def session_alive(group: int) -> bool:
    """Whether any process of session *group* still runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return bool(session_members(group))
