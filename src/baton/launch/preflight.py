"""What can be known to be wrong before anything is started. All problems at once, each with its remedy."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import resource
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from baton.cluster import Cluster, Device, Role
from baton.launch.cluster_run import install_for
from baton.launch.commands import DEFAULT_KV_CACHE_BYTES, KV_SPACE, Command, flag_value, without_flag
from baton.launch.components import components_problems, saved_share
from baton.launch.devices import EngineInstall, nixl_version
from baton.launch.fits import check_alone, check_fits
from baton.launch.heads import block_problem, heads_problem, sizes_problem
from baton.launch.model_config import read_config
from baton.launch.planned import kinds_of
from baton.launch.ports import claims_of, means_here, peer_nodes
from baton.launch.problem import Problem
from baton.launch.shapes import experts_problem, ranks_of, side_channels
from baton.launch.speculative import check_speculative
from baton.launch.static_shapes import check_static_shapes
from baton.launch.versions import known_of
from baton.numbers import decimal, human_size

ENGINE_OVERHEAD_BYTES = 1_100_000_000
"""What an engine's three forked processes take beside weights and KV cache (docs/performance.md): 0.28 GB each of their
own, and their part of the libraries that all engines of a host share."""

WORKER_OVERHEAD_BYTES = 600_000_000
"""What each worker beyond the first adds to that, with the engine core of its data parallel rank: 0.53 GB were measured
with a model of 29 MB."""

VOCABULARY_COPIES = 3
"""Sizes of the larger of embedding and LM head that an engine takes beside its weights: vLLM lays them out for its
kernels and keeps the first layout too (0.32, model_executor/layers/utils.py, ``dispatch_cpu_unquantized_gemm``), and
sampling and the tokenizer grow with the vocabulary. Fitted: beside weights and KV cache the embedded model took 0.4 GB
more than one of 573 MB with 320 tokens."""

DESCRIPTORS = 1024
"""Files that an engine and its clients have open, at the least."""

SHM_WORKER_BYTES = 16 << 20
"""One message from an engine core to a worker, at most (vllm 0.32, VLLM_MQ_MAX_CHUNK_BYTES_MB); the ring holds ten, and
touches what it uses."""

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
    problems += check_alone(command, install.device)
    problems += check_components([command], install, local_model=local_model)
    if local_model:
        problems += check_experts([command], install) + check_weights([command])
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
    node: str | None = None,
) -> list[Problem]:
    """What would stop any process of *cluster* from starting.

    Args:
        commands: of its instances, in their order.
        node: the host of the plan that this one is; None when all of it starts here.
    """
    commands = list(commands)
    problems = check_install(install) + check_device(cluster, install)
    problems += check_plan(cluster, commands, install, local_model=local_model)
    claims = [claim for claim in claims_of(cluster) if node is None or claim.node == node]
    problems += check_ports((claim.host, claim.port, claim.owner) for claim in claims)
    commands = [
        command
        for instance, command in zip(cluster.instances, commands, strict=True)
        if node is None or instance.node == node
    ]
    workers = sum(ranks_of(command.argv).workers for command in commands)
    problems += check_descriptors() + check_shared_memory(workers)
    if install_for(cluster, install).device == "cpu" and local_model:
        problems += check_memory(commands, environ)
    return problems


def check_plan(
    cluster: Cluster, commands: Iterable[Command], install: EngineInstall, *, local_model: bool
) -> list[Problem]:
    """What is wrong with *cluster* wherever it is started: what needs no look at this machine.

    Args:
        commands: of its instances, in their order.
        local_model: whether the model's files are on this disk.
    """
    commands, install = list(commands), install_for(cluster, install)
    kinds = [command for _, command in kinds_of(cluster, commands)]
    problems = check_shape(kinds, install, local_model=local_model)
    problems += check_components(kinds, install, local_model=local_model)
    if local_model:
        problems += check_experts(kinds, install) + check_weights(kinds)
    problems += check_static_shapes(kinds, install)
    problems += [Problem(what, words=True) for what in check_speculative(cluster)]
    problems += check_roles(cluster, commands)
    problems += check_fits(cluster, commands, install.device)
    return problems + check_routable(cluster)


def check_routable(cluster: Cluster) -> list[Problem]:
    """A problem for each engine with peers on other hosts that would tell them an address of nobody's.

    What is bound is what is advertised (vllm 0.32, nixl/base_scheduler.py), so all addresses won't do either.
    """
    problems, peers = [], peer_nodes(cluster)
    for instance in cluster.instances:
        others = [node for node in peers[instance.role] if node != instance.node]
        if others and means_here(instance.side_channel_host):
            problems.append(
                Problem(
                    f"{instance.id}'s side channel host is {instance.side_channel_host}, and peers on "
                    f"{', '.join(others[:4])} are told that address: give {instance.node} an address that "
                    "they reach (host, or side_channel_host)",
                    words=True,
                )
            )
    apart = {instance.node for instance in cluster.instances} - {cluster.proxy_node}
    unreached = [each for each in cluster.instances if each.node in apart and means_here(each.host)]
    return problems + [
        Problem(
            f"{each.id} listens on {each.host} of {each.node}, and the proxy on {cluster.proxy_node} cannot reach it: "
            "give it a host",
            words=True,
        )
        for each in unreached
    ]


def check_device(cluster: Cluster, install: EngineInstall) -> list[Problem]:
    """Engines for one device cannot run on the vLLM for another."""
    if cluster.device is None or not install.distribution:
        return []
    if (cluster.device is Device.CPU) == (install.device == "cpu"):
        return []
    what = f"device is {cluster.device}, and the vLLM installed here ({install.distribution} {install.version}) is for "
    other = "cpu" if install.device == "cpu" else "accelerators"
    return [Problem(f"{what}{other}: install the other, or change device", words=True)]


def check_descriptors(limit: int | None = None) -> list[Problem]:
    """A problem when a process may open too few files to serve; the soft limit is raised by vLLM and the proxy."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if limit is None else limit
    if hard == resource.RLIM_INFINITY or hard >= DESCRIPTORS:
        return []
    return [
        Problem(
            f"a process may open {hard} files here, and an engine needs {DESCRIPTORS}: raise the hard limit "
            "(ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
        )
    ]


def check_shared_memory(workers: int, free: int | None = None) -> list[Problem]:
    """A problem when /dev/shm is so small that an engine would be killed by its first large message."""
    free = shared_memory_bytes() if free is None else free
    needed = workers * SHM_WORKER_BYTES
    if free is None or free >= needed:
        return []
    return [
        Problem(
            f"shared memory (/dev/shm) has {free / 1e6:.0f} MB free, and {workers} workers write messages of up to "
            f"{needed / 1e6:.0f} MB there: remove what is left in it, or give the container --shm-size=1g"
        )
    ]


def shared_memory_bytes(path: str = "/dev/shm") -> int | None:  # noqa: S108 (POSIX shared memory)
    """Bytes free for shared memory; None where there is no such place."""
    with contextlib.suppress(OSError):
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize
    return None


def check_install(install: EngineInstall, versions: Mapping[str, str] | None = None) -> list[Problem]:
    """What is missing, and what is there in a version that cannot work.

    Args:
        versions: of vllm and nixl; None for what is installed.
    """
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
    known = known_of({"vllm": install.version, "nixl": nixl_version()} if versions is None else versions)
    problems += [
        Problem(f"{each.package} is {version}: {each.what}: {each.remedy}") for each, version in known if each.broken
    ]
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


def check_weights(commands: Iterable[Command]) -> list[Problem]:
    """A problem for each file of weights that cannot be opened: a link to nothing, or somebody else's."""
    problems = []
    for folder in dict.fromkeys(command.argv[3] for command in commands):
        for path in sorted(Path(folder).glob("*.safetensors")):
            try:
                path.open("rb").close()
            except OSError as error:
                link = f"it is a link to {path.readlink()}" if path.is_symlink() else "it cannot be opened"
                problems.append(
                    Problem(f"{path}: {link}: {error.strerror}: fetch the model again, or make it readable")
                )
    return problems


def check_components(commands: Iterable[Command], install: EngineInstall, *, local_model: bool) -> list[Problem]:
    """A problem for each reason why replicas cannot share their components' weights as they were asked to."""
    found: dict[str, None] = {}
    for command in commands:
        config = read_config(Path(command.argv[3])) if local_model else {}
        found.update(dict.fromkeys(components_problems(command.argv, config, install.device)))
    return [Problem(what, words=True) for what in found]


def check_roles(cluster: Cluster, commands: Sequence[Command]) -> list[Problem]:
    """A problem for each pair of tensor parallel sizes between which no KV cache can be handed over.

    Args:
        commands: of *cluster*'s instances, in their order.
    """
    sizes: dict[Role, set[int]] = {Role.PREFILL: set(), Role.DECODE: set()}
    for instance, command in kinds_of(cluster, commands):
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
            if error.errno == errno.EADDRNOTAVAIL:
                return "that is no address of this host"
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
    estimates = [estimate(command, environ).total for command in commands]
    needed, free = sum(estimates), available_bytes()
    if needed <= free:
        return []
    each = ", ".join(f"{each / 1e9:.1f} GB" for each in estimates)
    return [
        Problem(
            f"too little memory: the engines need about {needed / 1e9:.1f} GB ({each}; weights, KV cache "
            f"and {ENGINE_OVERHEAD_BYTES / 1e9:.1f} GB of overhead each) and {free / 1e9:.1f} GB are free. "
            f"Lower --kv-cache-memory-bytes (or {KV_SPACE}, where that is set), "
            "use a smaller model or --dtype bfloat16, or stop something."
        )
    ]


@dataclass(frozen=True)
class Estimate:
    """Bytes that one engine will take.

    Attributes:
        weights: in the type they are served in, all ranks together.
        vocabulary: what a large one takes beside them (:data:`VOCABULARY_COPIES`).
        kv_cache: of all workers.
        overhead: of its processes.
    """

    weights: int
    vocabulary: int
    kv_cache: int
    overhead: int

    @property
    def total(self) -> int:
        return self.weights + self.vocabulary + self.kv_cache + self.overhead


def estimate(command: Command, environ: Mapping[str, str] = os.environ) -> Estimate:
    """What one engine on CPU will take.

    Data parallel ranks have the weights each, but for experts and components, which they may share; every worker has a
    KV cache.
    """
    ranks, folder = ranks_of(command.argv), Path(command.argv[3])
    weights = weight_bytes(folder, flag_value(command.argv, "--dtype"))
    saved = int(weights * saved_share(command.argv, tensor_bytes(folder))) if ranks.local > 1 else 0
    vocabulary = int(VOCABULARY_COPIES * weights * vocabulary_share(folder)) * ranks.local
    weights += int(weights * (1 - expert_share(folder))) * (ranks.local - 1) - saved * ranks.local
    kv_bytes = _kv_cache_bytes(command, environ)
    overhead = ENGINE_OVERHEAD_BYTES + WORKER_OVERHEAD_BYTES * (ranks.workers - 1)
    return Estimate(weights, vocabulary, kv_bytes * ranks.workers, overhead)


def _kv_cache_bytes(command: Command, environ: Mapping[str, str]) -> int:
    """Bytes of KV cache of one worker: as the environment says, the command's own first, then the flag."""
    space = decimal(command.environ.get(KV_SPACE, environ.get(KV_SPACE)))
    if space is not None:
        return space << 30
    kv = human_size(flag_value(command.argv, "--kv-cache-memory-bytes") or "")
    return DEFAULT_KV_CACHE_BYTES if kv is None else kv


def estimates(commands: Mapping[str, Command], environ: Mapping[str, str] = os.environ) -> dict[str, Estimate]:
    """:func:`estimate` for each of *commands*, by name; alike ones are looked at once."""
    seen: dict[tuple[str, ...], Estimate] = {}
    made = {}
    for name, command in commands.items():
        space = command.environ.get(KV_SPACE, environ.get(KV_SPACE, ""))
        key = (space, *without_flag(without_flag(command.argv, "--port"), "--host"))
        if key not in seen:
            seen[key] = estimate(command, environ)
        made[name] = seen[key]
    return made


def weight_bytes(folder: Path, dtype: str | None) -> int:
    """Bytes of the weights in *folder* once they are served as *dtype* (None: as they are stored)."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
        except OSError:
            # check_weights says so.
            continue
        stored = _STORED_BYTES.get(_stored_dtype(path), 0)
        served = _DTYPE_BYTES.get(dtype or "", 0)
        total += size * served // stored if stored and served else size
    return total


def expert_share(folder: Path) -> float:
    """The part of the weights in *folder* that is in experts: 0 to 1."""
    sizes = tensor_bytes(folder)
    return sum(size for name, size in sizes.items() if ".experts." in name) / (sum(sizes.values()) or 1)


def vocabulary_share(folder: Path) -> float:
    """The part of the weights in *folder* that is the larger of embedding and LM head: 0 to 1."""
    sizes = tensor_bytes(folder)
    largest = max((size for name, size in sizes.items() if "embed_tokens" in name or "lm_head" in name), default=0)
    return largest / (sum(sizes.values()) or 1)


def tensor_bytes(folder: Path) -> dict[str, int]:
    """Bytes of each tensor in *folder*, as it is stored."""
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        for name, entry in _tensors(path).items():
            first, end = entry["data_offsets"]
            sizes[name] = end - first
    return sizes


def _stored_dtype(path: Path) -> str:
    """The type of the first tensor of a safetensors file."""
    return next((str(entry.get("dtype")) for entry in _tensors(path).values()), "")


def _tensors(path: Path) -> dict[str, dict[str, Any]]:
    """What the header of a safetensors file (8 bytes of length, then JSON) says of each tensor."""
    try:
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            header = json.loads(handle.read(min(length, 100_000_000)))
    except (OSError, struct.error, ValueError, RecursionError):
        return {}
    if not isinstance(header, dict):
        return {}
    return {name: entry for name, entry in header.items() if name != "__metadata__" and _is_tensor(entry)}


def _is_tensor(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(each, int) for each in offsets)


def available_bytes() -> int:
    """Bytes that can be had without swapping, the control group's limit included."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):
        limit = int((group / "memory.max").read_text())
        free = min(free, max(0, limit - int((group / "memory.current").read_text())))
    return free
