"""From counts to a cluster: ports, side channels and cores for every instance."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.cluster import Cluster, Instance, Role, TransferMode, Transport
from baton.launch.commands import DEFAULT_PORTS, DEFAULT_SIDE_CHANNEL_PORTS
from baton.launch.devices import share_cpus
from baton.launch.errors import LaunchError
from baton.launch.shapes import ranks_of, side_channels


@dataclass(frozen=True)
class PlanRequest:
    """What `baton up` was asked for.

    Attributes:
        model: as the user called it.
        prefill, decode: how many instances of each role.
        host: where engines and proxy listen.
        proxy_port: the front door.
        prefill_port, decode_port: API port of the first instance; the next takes the next.
        prefill_side_port, decode_side_port: the same for side channels, one a data parallel rank.
        cpus: cores to share out.
        transfer_mode, bidirectional, pull_threshold: see :class:`baton.cluster.Cluster`.
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
    shares = share_cpus(request.cpus, request.prefill + request.decode)
    instances = tuple(
        _instance(request, role, index, shares[index if role is Role.PREFILL else request.prefill + index])
        for role, count in ((Role.PREFILL, request.prefill), (Role.DECODE, request.decode))
        for index in range(count)
    )
    _check_port("the proxy", request.proxy_port)
    cluster = Cluster(
        model=request.model,
        transfer_mode=request.transfer_mode,
        bidirectional=request.bidirectional,
        pull_threshold=request.pull_threshold,
        transport=request.transport,
        proxy_host=request.host,
        proxy_port=request.proxy_port,
        proxy_flags=request.proxy_flags,
        instances=instances,
    )
    port_owners(cluster)
    return cluster


def port_owners(cluster: Cluster) -> dict[int, str]:
    """Every port of *cluster* and whose it is.

    Raises:
        LaunchError: a port has two owners; the message names both.
    """
    owners: dict[int, str] = {}
    for _, port, owner in port_claims(cluster):
        if port in owners:
            raise LaunchError(f"port {port} is planned for {owners[port]} and for {owner}: move one of them")
        owners[port] = owner
    return owners


def port_claims(cluster: Cluster) -> list[tuple[str, int, str]]:
    """Host, port and owner of everything that will listen."""
    claims = [(cluster.proxy_host, cluster.proxy_port, "the proxy")]
    for instance in cluster.instances:
        claims.append((instance.host, instance.port, f"{instance.id}'s API"))
        sides = side_channels(instance.side_channel_port, ranks_of(instance.engine_args))
        claims += [(instance.side_channel_host, port, f"{instance.id}'s {owner}") for port, owner in sides.items()]
    return claims


def _instance(request: PlanRequest, role: Role, index: int, cpus: tuple[int, ...]) -> Instance:
    prefill = role is Role.PREFILL
    port = (request.prefill_port if prefill else request.decode_port) + index
    args = request.common_args + (request.prefill_args if prefill else request.decode_args)
    side_port = (request.prefill_side_port if prefill else request.decode_side_port) + index * ranks_of(args).local
    name = f"{role.letter}{index}"
    _check_port(f"{name}'s API", port)
    for side, owner in side_channels(side_port, ranks_of(args)).items():
        _check_port(f"{name}'s {owner}", side)
    return Instance(
        id=name,
        role=role,
        host=request.host,
        port=port,
        side_channel_host=request.host,
        side_channel_port=side_port,
        cpus=cpus,
        engine_args=args,
    )


def _check_port(owner: str, port: int) -> None:
    if not 0 < port < 65536:
        raise LaunchError(f"port {port} for {owner} is not a port number (1 to 65535)")
