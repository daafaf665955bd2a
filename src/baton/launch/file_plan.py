"""From a cluster file and flags to a planned cluster, or to the engines that a proxy is to know. Pure.

A flag wins over the file, the file over the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.cluster import Cluster, Endpoint, Instance, Role, TransferMode, Transport
from baton.launch.cluster_file import ClusterFile, EngineEntry
from baton.launch.commands import DEFAULT_PORTS, DEFAULT_SIDE_CHANNEL_PORTS
from baton.launch.devices import share_cpus
from baton.launch.errors import LaunchError
from baton.launch.plan import port_owners


@dataclass(frozen=True)
class RoleFlags:
    """What flags say of one role; None where they say nothing.

    Attributes:
        count: how many servers.
        port, side_channel_port: of the first one; the next takes the next.
        engine_args: `vllm serve` flags for this role.
    """

    count: int | None = None
    port: int | None = None
    side_channel_port: int | None = None
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flags:
    """What the command line says; it wins over the file.

    Attributes:
        model, host, proxy_port: None where it says nothing.
        common_args: `vllm serve` flags for every engine.
        proxy_flags: more flags of the proxy.
        roles: what it says of each role.
        transfer_mode: None where it says nothing.
        bidirectional, pull_threshold, transport: see :class:`baton.cluster.Cluster`.
    """

    model: str | None = None
    host: str | None = None
    proxy_port: int | None = None
    common_args: tuple[str, ...] = ()
    proxy_flags: tuple[str, ...] = ()
    roles: Mapping[Role, RoleFlags] = field(default_factory=dict)
    transfer_mode: TransferMode | None = None
    bidirectional: bool = False
    pull_threshold: int | None = None
    transport: Transport = field(default_factory=Transport)

    def of_role(self, role: Role) -> RoleFlags:
        return self.roles.get(role, RoleFlags())


def plan_file(file: ClusterFile, flags: Flags, cpus: Sequence[int]) -> Cluster:
    """The cluster that a file and flags come to.

    Args:
        cpus: the cores that engines without cores of their own share.

    Raises:
        LaunchError: flags and file don't go together, a port has two owners or is none, a core is not here.
    """
    entries = {role: _entries(file, flags, role) for role in Role}
    shares = share_cpus(cpus, sum(map(len, entries.values())))
    places = {role: _places(file, flags, role, entries[role]) for role in Role}
    instances: list[Instance] = []
    for role in Role:
        more = flags.of_role(role)
        for index, (entry, (host, port, side)) in enumerate(zip(entries[role], places[role], strict=True)):
            share = shares[len(instances)]
            name = f"{role.letter}{index}"
            missing = sorted(set(entry.cpus or ()) - set(cpus))
            if missing:
                raise LaunchError(
                    f"{name}'s cpus are {_listed(entry.cpus or ())}, and there is no core {_listed(missing)} here: "
                    f"there are {_listed(cpus)}"
                )
            instances.append(
                Instance(
                    id=name,
                    role=role,
                    host=host,
                    port=_port(port, f"{name}'s API"),
                    side_channel_host=host,
                    side_channel_port=_port(side, f"{name}'s side channel"),
                    cpus=entry.cpus or share,
                    engine_args=(
                        *file.defaults.engine_args,
                        *entry.engine_args,
                        *flags.common_args,
                        *more.engine_args,
                    ),
                    environ={**file.defaults.environ, **entry.environ},
                )
            )
    cluster = Cluster(
        model=flags.model or file.model,
        transfer_mode=flags.transfer_mode or file.transfer_mode,
        bidirectional=flags.bidirectional or file.bidirectional_kv,
        pull_threshold=file.remote_pull_threshold if flags.pull_threshold is None else flags.pull_threshold,
        transport=flags.transport,
        proxy_host=flags.host or file.proxy.host or "127.0.0.1",
        proxy_port=flags.proxy_port or file.proxy.port or 8000,
        proxy_flags=(*file.proxy.flags, *flags.proxy_flags),
        instances=tuple(instances),
    )
    port_owners(cluster)
    return cluster


def file_endpoints(file: ClusterFile, role: Role) -> tuple[Endpoint, ...]:
    """The engines of *role* as a proxy reaches them; they may be on other hosts."""
    entries = _entries(file, Flags(), role)
    return tuple(
        Endpoint(role=role, host=host, port=_port(port, f"{role.letter}{index}'s API"))
        for index, (host, port, _) in enumerate(_places(file, Flags(), role, entries))
    )


def _entries(file: ClusterFile, flags: Flags, role: Role) -> list[EngineEntry]:
    """An entry for each engine of *role*."""
    given, count = file.of_role(role), flags.of_role(role).count
    if count is None:
        return [entry for entry in given for _ in range(entry.replicas)]
    if len(given) > 1:
        raise LaunchError(
            f"--{role} {count}: the cluster file lists {len(given)} {role} entries of their own; "
            "change the file, or leave the flag out"
        )
    return [given[0]] * count


def _places(file: ClusterFile, flags: Flags, role: Role, entries: Sequence[EngineEntry]) -> list[tuple[str, int, int]]:
    """Host, API port and side channel port of each engine of *role*."""
    said = flags.of_role(role)
    made: list[tuple[str, int, int]] = []
    replica = 0
    for index, entry in enumerate(entries):
        host = flags.host or entry.host or file.defaults.host or "127.0.0.1"
        neighbours = sum(each[0] == host for each in made)
        # The entries of one cluster file are values of their own; replicas are the same one again.
        replica = replica + 1 if index and entry is entries[index - 1] else 0
        port = _counted(said.port, index, entry.port, replica, DEFAULT_PORTS[role] + neighbours)
        default = DEFAULT_SIDE_CHANNEL_PORTS[role] + neighbours
        made.append((host, port, _counted(said.side_channel_port, index, entry.side_channel_port, replica, default)))
    return made


def _counted(flag: int | None, index: int, own: int | None, replica: int, default: int) -> int:
    """A port: counted from the flag's through the role, else from the entry's own through its replicas."""
    if flag is not None:
        return flag + index
    return own + replica if own is not None else default


def _port(port: int, owner: str) -> int:
    if not 0 < port < 65536:
        raise LaunchError(f"port {port} for {owner} is not a port number (1 to 65535)")
    return port


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
