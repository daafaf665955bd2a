"""What can be known to be wrong before anything is started. All problems at once, each with its remedy."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from baton.cluster import Cluster, Role
from baton.launch.commands import DEFAULT_KV_CACHE_BYTES, Command, flag_value
from baton.launch.devices import EngineInstall
from baton.launch.fits import check_fits
from baton.launch.heads import block_problem, heads_problem, sizes_problem
from baton.launch.model_config import read_config
from baton.launch.plan import port_claims
from baton.launch.problem import Problem
from baton.launch.shapes import experts_problem, ranks_of, side_channels
from baton.launch.speculative import check_speculative
from baton.launch.static_shapes import check_static_shapes

ENGINE_OVERHEAD_BYTES = 1_600_000_000
"""What an engine's three forked processes take beside weights and KV cache (docs/performance.md)."""

WORKER_OVERHEAD_BYTES = 600_000_000
"""What each worker beyond the first adds to that, with the engine core of its data parallel rank: 0.53 GB were measured
with a model of 29 MB."""

_DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_STORED_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


def check_engine(
    command: Command, install: EngineInstall, *, local_model: bool, environ: Mapping[str, str] = os.environ
) -> list[Problem]:
    """What would stop one engine from starting."""
    problems = check_install(install)
    port = int(flag_value(command.argv, "--port") or 8000)
    host = flag_value(command.argv, "--host") or "0.0.0.0"
    side_host = command.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    sides = side_channels(int(command.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]), ranks_of(command.argv))
    if port in sides:
        problems.append(
            Problem(
                f"port {port} is planned for the API and for the {sides[port]}: move one with --port "
                "or --side-channel-port",
                words=True,
            )
        )
    problems += check_shape([command], install, local_model=local_model)
    if local_model:
        problems += check_experts([command], install)
    problems += check_static_shapes([command], install)
    if max(sides) > 65535:
        what = f"the side channel's last port, {max(sides)}, is beyond 65535: lower --side-channel-port"
        return [*problems, Problem(what, words=True)]
    problems += check_ports(
        [(host, port, "the API"), *((side_host, side, f"the {owner}") for side, owner in sides.items())]
    )
    if install.device == "cpu" and local_model:
        problems += check_memory([command], environ)
    return problems


def check_cluster(
    cluster: Cluster,
    commands: Iterable[Command],
    install: EngineInstall,
    *,
    local_model: bool,
    environ: Mapping[str, str] = os.environ,
) -> list[Problem]:
    """What would stop any process of *cluster* from starting."""
    commands = list(commands)
    problems = check_install(install)
    problems += check_shape(commands, install, local_model=local_model)
    if local_model:
        problems += check_experts(commands, install)
    problems += check_static_shapes(commands, install)
    problems += [Problem(what, words=True) for what in check_speculative(cluster)]
    problems += check_roles(cluster, commands)
    problems += check_fits(cluster, commands, install.device)
    problems += check_ports(port_claims(cluster))
    if install.device == "cpu" and local_model:
        problems += check_memory(commands, environ)
    return problems


def check_install(install: EngineInstall) -> list[Problem]:
    problems = []
    if not install.distribution:
        problems.append(
            Problem("no vLLM is installed in this Python: run `make venv`, or pip install 'baton-serve[engine-cuda]'")
        )
    if not install.has_nixl:
        problems.append(
            Problem(
                "the nixl package is missing, and the KV cache travels over it: run `make venv`, or pip install nixl"
            )
        )
    return problems


def check_shape(commands: Iterable[Command], install: EngineInstall, *, local_model: bool) -> list[Problem]:
    """A problem for each head count that cannot be shared out, and each block size that the device refuses."""
    found: dict[str, None] = {}
    for command in commands:
        config = read_config(Path(command.argv[3])) if local_model else {}
        heads = heads_problem(config, ranks_of(command.argv).tensor)
        block = block_problem(command.argv) if install.device == "cpu" else None
        found.update(dict.fromkeys(problem for problem in (heads, block) if problem))
    return [Problem(what, words=True) for what in found]


def check_roles(cluster: Cluster, commands: Iterable[Command]) -> list[Problem]:
    """A problem for each pair of tensor parallel sizes between which no KV cache can be handed over.

    Args:
        commands: of *cluster*'s instances, in their order.
    """
    sizes: dict[Role, set[int]] = {Role.PREFILL: set(), Role.DECODE: set()}
    for instance, command in zip(cluster.instances, commands, strict=True):
        sizes[instance.role].add(ranks_of(command.argv).tensor)
    pairs = itertools.product(sorted(sizes[Role.PREFILL]), sorted(sizes[Role.DECODE]))
    return [Problem(what, words=True) for pair in pairs if (what := sizes_problem(*pair))]


def check_experts(commands: Iterable[Command], install: EngineInstall) -> list[Problem]:
    """A problem for each way in which experts would be spread over ranks and cannot be."""
    found = (
        experts_problem(
            read_config(Path(command.argv[3])),
            flag_value(command.argv, "--served-model-name") or command.argv[3],
            command.argv,
            on_cpu=install.device == "cpu",
        )
        for command in commands
    )
    return [Problem(what, words=True) for what in dict.fromkeys(filter(None, found))]


def check_ports(claims: Iterable[tuple[str, int, str]]) -> list[Problem]:
    """A problem for each (host, port, owner) whose port somebody listens on already."""
    problems = []
    for host, port, owner in claims:
        error = _bind_error(host, port)
        if error:
            problems.append(Problem(f"port {port} for {owner} is not free on {host}: {error}"))
    return problems


def _bind_error(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        # As the servers do: a port in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except PermissionError:
            return "ports below 1024 need privileges; choose a higher one"
        except OSError as error:
            if isinstance(error, socket.gaierror):
                return f"the host name does not resolve ({error.strerror})"
            return f"{_listener(port) or error.strerror} has it; stop that or choose another port"
    return None


def _listener(port: int) -> str | None:
    """Who listens on *port*, where we may know."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return None
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None


# memory


def check_memory(commands: list[Command], environ: Mapping[str, str] = os.environ) -> list[Problem]:
    """A problem when the engines together would not fit into what is free."""
    needed = sum(estimate_bytes(command, environ) for command in commands)
    free = available_bytes()
    if needed <= free:
        return []
    each = ", ".join(f"{estimate_bytes(command, environ) / 1e9:.1f} GB" for command in commands)
    return [
        Problem(
            f"too little memory: the engines need about {needed / 1e9:.1f} GB ({each}; weights, KV cache and "
            f"{ENGINE_OVERHEAD_BYTES / 1e9:.1f} GB of overhead each) and {free / 1e9:.1f} GB are free. "
            "Lower --kv-cache-memory-bytes, use a smaller model or --dtype bfloat16, or stop something."
        )
    ]


def estimate_bytes(command: Command, environ: Mapping[str, str] = os.environ) -> int:
    """Bytes that one engine on CPU will take: weights in the served type, KV cache, overhead.

    Data parallel ranks have the weights each, but for the experts, which they share; every worker has a KV cache.
    """
    ranks, folder = ranks_of(command.argv), Path(command.argv[3])
    weights = weight_bytes(folder, flag_value(command.argv, "--dtype"))
    if ranks.local > 1:
        weights += int(weights * (1 - expert_share(folder))) * (ranks.local - 1)
    kv = flag_value(command.argv, "--kv-cache-memory-bytes")
    space = environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if kv and kv.isdigit():
        kv_bytes = int(kv)
    else:
        kv_bytes = int(space) << 30 if space.isdigit() else DEFAULT_KV_CACHE_BYTES
    return weights + kv_bytes * ranks.workers + ENGINE_OVERHEAD_BYTES + WORKER_OVERHEAD_BYTES * (ranks.workers - 1)


def weight_bytes(folder: Path, dtype: str | None) -> int:
    """Bytes of the weights in *folder* once they are served as *dtype* (None: as they are stored)."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        stored = _STORED_BYTES.get(_stored_dtype(path), 0)
        served = _DTYPE_BYTES.get(dtype or "", 0)
        total += size * served // stored if stored and served else size
    return total


def expert_share(folder: Path) -> float:
    """The part of the weights in *folder* that is in experts: 0 to 1."""
    sizes = {True: 0, False: 0}
    for path in folder.glob("*.safetensors"):
        for name, entry in _tensors(path).items():
            first, end = entry["data_offsets"]
            sizes[".experts." in name] += end - first
    return sizes[True] / (sum(sizes.values()) or 1)


def _stored_dtype(path: Path) -> str:
    """The type of the first tensor of a safetensors file."""
    return next((str(entry["dtype"]) for entry in _tensors(path).values()), "")


def _tensors(path: Path) -> dict[str, dict[str, Any]]:
    """What the header of a safetensors file (8 bytes of length, then JSON) says of each tensor."""
    with path.open("rb") as handle:
        try:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(min(length, 100_000_000)))
        except (struct.error, ValueError):
            return {}
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def available_bytes() -> int:
    """Bytes that can be had without swapping, the control group's limit included."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, max(0, limit - int((group / "memory.current").read_text())))
    return free
