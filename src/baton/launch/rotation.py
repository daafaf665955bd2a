"""Logs that don't fill the disk: a long one is moved aside and cut, while its writer writes on."""

from __future__ import annotations

import shutil
from pathlib import Path

KEPT = 3
"""Older pieces of one log: ``D0.log.1`` is the last one."""


def rotate(log: Path, limit_bytes: int, kept: int = KEPT) -> bool:
    """Move *log* aside when it is longer than *limit_bytes*; whether it was.

    It is copied and cut, since its writer has it open; that one must append. What is written between the two is lost.
    """
    try:
        if log.stat().st_size <= limit_bytes:
            return False
    except FileNotFoundError:
        return False
    older = [log.with_name(f"{log.name}.{number}") for number in range(1, kept + 1)]
    for newer, old in zip(reversed(older[:-1]), reversed(older[1:]), strict=True):
        if newer.exists():
            newer.replace(old)
    with log.open("r+b") as source, older[0].open("wb") as target:
        shutil.copyfileobj(source, target)
        source.truncate(0)
    return True
