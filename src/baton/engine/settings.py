"""What the launcher tells an engine process, through its environment.

One place for the names, so that the launcher writes what the plugin reads. An
environment is used, not flags, since forked and spawned children inherit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.numbers import decimal

ENGINE_SWITCH = "BATON_ENGINE"
"""Set to 1 by `baton engine`: without it the vLLM plugin does nothing."""

CPUS = "BATON_CPUS"
NIXL_NAP_US = "BATON_NIXL_NAP_US"
WORKER_START = "BATON_WORKER_START"
STATIC_SHAPES = "BATON_STATIC_SHAPES"
"""Set to 1 by ``--static-shapes`` (engine/static)."""

DEFAULT_NIXL_NAP_US = 500
"""500 us was measured as the shortest nap that leaves an idle engine under 5 % of a core."""


_HIGHEST_CORE = 65535
"""Also of devices: far beyond what Linux numbers today, and quick to list."""


@dataclass(frozen=True)
class EngineSettings:
    """Baton's own settings of one engine process.

    Attributes:
        active: whether Baton started this process.
        cpus: core numbers that the engine and its children may run on; empty means all.
        nixl_nap_us: microseconds that NIXL's progress thread sleeps between two polls; 0 spins.
        worker_start: how vLLM's child processes start, ``fork`` or ``spawn``.
        static_shapes: whether every step has the size of a bucket.
    """

    active: bool = False
    cpus: tuple[int, ...] = ()
    nixl_nap_us: int = DEFAULT_NIXL_NAP_US
    worker_start: str = "fork"
    static_shapes: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> EngineSettings:
        """The settings that *environ* holds.

        Raises:
            ValueError: a variable has a value that cannot be used; the message names both.
        """
        start = environ.get(WORKER_START, "fork")
        if start not in ("fork", "spawn"):
            raise ValueError(f"{WORKER_START}={start!r} is neither fork nor spawn")
        return cls(
            active=environ.get(ENGINE_SWITCH) == "1",
            cpus=parse_cpus(environ.get(CPUS, "")),
            nixl_nap_us=_natural(environ, NIXL_NAP_US, DEFAULT_NIXL_NAP_US),
            worker_start=start,
            static_shapes=_switch(environ, STATIC_SHAPES),
        )


def parse_cpus(text: str) -> tuple[int, ...]:
    """The core numbers of a list such as ``0-3,8``, ascending; nothing for an empty text.

    Raises:
        ValueError: the text is no such list.
    """
    cores: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        low = decimal(first)
        high = decimal(last) if dash else low
        if low is None or high is None:
            raise ValueError(f"{part!r} is not a core number or a range such as 0-3")
        if high < low:
            raise ValueError(f"the core range {part!r} runs backwards")
        if high > _HIGHEST_CORE:
            raise ValueError(f"{part!r} goes beyond {_HIGHEST_CORE}, and no host has so many: give a lower number")
        cores.update(range(low, high + 1))
    return tuple(sorted(cores))


def format_cpus(cpus: tuple[int, ...]) -> str:
    """The shortest text that :func:`parse_cpus` reads back as *cpus*."""
    parts: list[str] = []
    start = previous = None
    for core in (*cpus, None):
        if start is None:
            start = previous = core
        elif previous is not None and core == previous + 1:
            previous = core
        else:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = previous = core
    return ",".join(parts)


def _switch(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name}={text!r} is neither 0 nor 1")
    return text == "1"


def _natural(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    value = decimal(text)
    if value is None:
        raise ValueError(f"{name}={text!r} is not a whole number of 0 or more")
    return value
