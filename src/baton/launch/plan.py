"""From counts to a cluster: what flags alone come to is what the cluster file of those flags comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.cluster import Cluster, Device, Role, TransferMode, Transport
from baton.launch.cluster_file import ClusterFile, EngineEntry
from baton.launch.commands import DEFAULT_PORTS, DEFAULT_SIDE_CHANNEL_PORTS
from baton.launch.errors import LaunchError
from baton.launch.file_plan import Flags, RoleFlags, plan_file


@dataclass(frozen=True)
class PlanRequest:
    """What `baton up` was asked for, on one host and without a cluster file.

    Attributes:
        model: as the user called it.
        prefill, decode: how many instances of each role.
        host: where engines and proxy listen.
        proxy_port: the front door.
        prefill_port, decode_port: API port of the first instance; the next takes the next.
        prefill_side_port, decode_side_port: the same for side channels, one a data parallel rank.
        cpus: cores to share out.
        numa: the cores of each NUMA node; empty when that is not known.
        device, transfer_mode, bidirectional, pull_threshold: see :class:`baton.cluster.Cluster`.
        common_args, prefill_args, decode_args: `vllm serve` flags.
        transport: what the KV cache travels over.
        proxy_flags: more flags of the proxy.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    host: str = "127.0.0.1"
    proxy_port: int = 8000
    prefill_port: int = DEFAULT_PORTS[Role.PREFILL]
    decode_port: int = DEFAULT_PORTS[Role.DECODE]
    prefill_side_port: int = DEFAULT_SIDE_CHANNEL_PORTS[Role.PREFILL]
    decode_side_port: int = DEFAULT_SIDE_CHANNEL_PORTS[Role.DECODE]
    cpus: tuple[int, ...] = (0,)
    numa: tuple[tuple[int, ...], ...] = ()
    device: Device | None = None
    transfer_mode: TransferMode = TransferMode.READ
    bidirectional: bool = False
    pull_threshold: int | None = None
    common_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()
    transport: Transport = field(default_factory=Transport)
    proxy_flags: tuple[str, ...] = ()


def plan(request: PlanRequest) -> Cluster:
    """A cluster with a place for everything and no port given twice.

    Raises:
        LaunchError: a role has no instance, a port is out of range, or two owners got one port.
    """
    for role, count in ((Role.PREFILL, request.prefill), (Role.DECODE, request.decode)):
        if count < 1:
            raise LaunchError(f"--{role} {count}: a cluster needs at least one {role} server")
    roles = {
        Role.PREFILL: RoleFlags(request.prefill, request.prefill_port, request.prefill_side_port, request.prefill_args),
        Role.DECODE: RoleFlags(request.decode, request.decode_port, request.decode_side_port, request.decode_args),
    }
    flags = Flags(
        host=request.host,
        proxy_port=request.proxy_port,
        common_args=request.common_args,
        proxy_flags=request.proxy_flags,
        roles=roles,
        device=request.device,
        transfer_mode=request.transfer_mode,
        bidirectional=request.bidirectional,
        pull_threshold=request.pull_threshold,
        transport=request.transport,
    )
    file = ClusterFile(model=request.model, prefill=(EngineEntry(),), decode=(EngineEntry(),))
    return plan_file(file, flags, request.cpus, request.numa)
