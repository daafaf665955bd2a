"""Rounds on the clock and in CPU time: the second says what the first would be where nobody else computes."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One run, in seconds.

    Attributes:
        wall: on the clock.
        cpu: of this process and of the children that ended meanwhile.
    """

    wall: float
    cpu: float


def timed(work: Callable[[], object], rounds: int) -> list[Round]:
    found = []
    for _ in range(rounds):
        began, started = sum(os.times()[:4]), time.perf_counter()
        work()
        found.append(Round(time.perf_counter() - started, sum(os.times()[:4]) - began))
    return found


HEAD = "| what | p50 | max | CPU p50 |\n| --- | --- | --- | --- |"


def row(what: str, rounds: list[Round], unit: float = 1.0, digits: int = 2) -> str:
    """A line of a table; *unit* 1000 for milliseconds."""
    walls = [each.wall * unit for each in rounds]
    cpu = statistics.median(each.cpu * unit for each in rounds)
    return f"| {what} | {statistics.median(walls):.{digits}f} | {max(walls):.{digits}f} | {cpu:.{digits}f} |"
