"""From a cluster file and flags to a planned cluster, or to the engines that a proxy is to know. Pure.

A flag wins over the file, the file over the environment.
"""

from __future__ import annotations

import difflib
import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.cluster import THIS_HOST, Cluster, Device, Endpoint, Instance, Role, TransferMode, Transport
from baton.launch.allot import allot_cpus, allot_devices
from baton.launch.cluster_file import ClusterFile, EngineDefaults, EngineEntry
from baton.launch.commands import DEFAULT_PORTS, DEFAULT_SIDE_CHANNEL_PORTS
from baton.launch.doors import check_doors
from baton.launch.errors import LaunchError
from baton.launch.ports import means_here, port_owners
from baton.launch.shapes import check_ranks, ranks_of, side_channels


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
        device, transfer_mode: None where it says nothing.
        bidirectional, pull_threshold, transport: see :class:`baton.cluster.Cluster`.
    """

    model: str | None = None
    host: str | None = None
    proxy_port: int | None = None
    common_args: tuple[str, ...] = ()
    proxy_flags: tuple[str, ...] = ()
    roles: Mapping[Role, RoleFlags] = field(default_factory=dict)
    device: Device | None = None
    transfer_mode: TransferMode | None = None
    bidirectional: bool = False
    pull_threshold: int | None = None
    transport: Transport = field(default_factory=Transport)

    def of_role(self, role: Role) -> RoleFlags:
        return self.roles.get(role, RoleFlags())


@dataclass(frozen=True)
class Place:
    """Where one engine goes.

    Attributes:
        name: ``P0``.
        entry: what the file says of it.
        merged: that, over what the file says of its role and of all.
        replica: its number among the entry's engines on its host.
        node: its host, by its name in the plan.
        address: of that.
        port, side_channel_port: its ports.
        args: its flags of `vllm serve`.
    """

    name: str
    role: Role
    entry: EngineEntry
    merged: EngineDefaults
    replica: int
    node: str
    address: str
    port: int
    side_channel_port: int
    args: tuple[str, ...]


def plan_file(file: ClusterFile, flags: Flags, cpus: Sequence[int], numa: Sequence[Sequence[int]] = ()) -> Cluster:
    """The cluster that a file and flags come to.

    Args:
        cpus: the cores of this host, which engines without cores of their own share when all are on one host.
        numa: the cores of each of its NUMA nodes.

    Raises:
        LaunchError: flags and file don't go together, a port or device has two owners or is none, a core is not here,
            two hosts have one address, or a server would listen elsewhere than planned.
    """
    places = [place for role in Role for place in _places(file, flags, role)]
    _check_hosts(file, places)
    device = flags.device or file.device
    nodes = dict.fromkeys(place.node for place in places)
    cores: dict[str, tuple[int, ...]] = {}
    devices: dict[str, tuple[int, ...]] = {}
    host_cores: dict[str, tuple[int, ...]] = {}
    host_devices: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        mine, part = [place for place in places if place.node == node], file.hosts.get(node)
        given = () if part is None else part.numa or ((part.cpus,) if part.cpus else ())
        pools = given or ((numa or (cpus,)) if len(nodes) == 1 else ())
        if pools:
            host_cores[node] = tuple(sorted({core for pool in pools for core in pool}))
        cores |= allot_cpus(node, [(each.name, each.entry.cpus) for each in mine], pools, shared=device in _SHARES)
        if device in (Device.CUDA, Device.NEURON):
            has = None if part is None else part.devices
            devices |= allot_devices(node, [(each.name, _own(each), _needs(each)) for each in mine], has)
            if has is not None:
                host_devices[node] = has
    proxy_node, proxy_host = _proxy_place(file, flags, next(iter(nodes)))
    transport = Transport(
        backend=flags.transport.backend or file.transfer_backend,
        ucx_tls=flags.transport.ucx_tls if flags.transport.ucx_tls is not None else file.ucx_tls,
        threads=flags.transport.threads if flags.transport.threads is not None else file.nixl_threads,
    )
    cluster = Cluster(
        model=flags.model or file.model,
        device=device,
        transfer_mode=flags.transfer_mode or file.transfer_mode,
        bidirectional=flags.bidirectional or file.bidirectional_kv,
        pull_threshold=file.remote_pull_threshold if flags.pull_threshold is None else flags.pull_threshold,
        transport=transport,
        proxy_host=proxy_host,
        proxy_port=flags.proxy_port or file.proxy.port or 8000,
        proxy_node=proxy_node,
        proxy_flags=(*file.proxy.words(), *flags.proxy_flags),
        devices=host_devices,
        cpus=host_cores,
        instances=tuple(_instance(flags, each, cores, devices) for each in places),
    )
    port_owners(cluster)
    check_doors(cluster)
    return cluster


_SHARES = (None, Device.CPU)
"""On what device engines get cores of their own unasked."""


def file_endpoints(file: ClusterFile, role: Role) -> tuple[Endpoint, ...]:
    """The engines of *role* as a proxy reaches them; they may be on other hosts."""
    return tuple(Endpoint(role=role, host=each.address, port=each.port) for each in _places(file, Flags(), role))


def proxy_address(file: ClusterFile) -> str | None:
    """Where the file has the proxy listen; None when it does not say."""
    return None if file.proxy.host is None else _node(file, file.proxy.host, "proxy.host")[1]


def _instance(
    flags: Flags,
    place: Place,
    cores: Mapping[str, tuple[int, ...]],
    devices: Mapping[str, tuple[int, ...]],
) -> Instance:
    side = place.address if flags.host else place.merged.side_channel_host or place.address
    return Instance(
        id=place.name,
        role=place.role,
        host=place.address,
        port=place.port,
        node=place.node,
        side_channel_host=side,
        side_channel_port=place.side_channel_port,
        cpus=cores[place.name],
        devices=devices.get(place.name, ()),
        engine_args=place.args,
        environ=place.merged.environ,
    )


def _places(file: ClusterFile, flags: Flags, role: Role) -> list[Place]:
    """Where each engine of *role* goes: entry by entry, of each host by host."""
    said, made = flags.of_role(role), list[Place]()
    seen: Counter[str] = Counter()
    sides: Counter[str] = Counter()
    below, start = file.defaults.of_role(role), _before(file, role)
    taken = 0
    for entry, wanted in _wanted(file, flags, role):
        merged = entry.over(below)
        args = (*merged.words(), *flags.common_args, *said.engine_args)
        # A rank that is not the first of its engine has its port higher up.
        check_ranks(args)
        ranks = ranks_of(args)
        width = ranks.local if ranks.data > 1 else 1
        replicas: Counter[str] = Counter()
        for host in wanted:
            index = len(made)
            node, address = _home(file, flags, host or merged.host, start + index, f"{role.letter}{index}")
            replica = replicas[node]
            port = _counted(said.port, index, entry.port, replica, DEFAULT_PORTS[role] + seen[node])
            side = _counted(
                said.side_channel_port,
                taken,
                entry.side_channel_port,
                replica * width,
                DEFAULT_SIDE_CHANNEL_PORTS[role] + sides[node],
            )
            name = f"{role.letter}{index}"
            _check_port(port, f"{name}'s API")
            for each, owner in side_channels(side, ranks).items():
                _check_port(each, f"{name}'s {owner}")
            made.append(Place(name, role, entry, merged, replica, node, address, port, side, args))
            replicas[node] += 1
            seen[node] += 1
            sides[node] += width
            taken += width
    return made


def _wanted(file: ClusterFile, flags: Flags, role: Role) -> list[tuple[EngineEntry, list[str | None]]]:
    """Each entry of *role*, with the host that it names for each engine."""
    given, count = file.of_role(role), flags.of_role(role).count
    if count is None:
        return [(each, [host for host in each.hosts or (each.host,) for _ in range(each.replicas)]) for each in given]
    if len(given) > 1:
        raise LaunchError(
            f"--{role} {count}: the cluster file lists {len(given)} {role} entries of their own; "
            "change the file, or leave the flag out"
        )
    hosts = given[0].hosts or (given[0].host,)
    return [(given[0], [hosts[index % len(hosts)] for index in range(count)])]


def _before(file: ClusterFile, role: Role) -> int:
    """How many engines take a host in turn before those of *role*."""
    if role is Role.PREFILL:
        return 0
    return sum(entry.replicas * max(1, len(entry.hosts)) for entry in file.prefill)


def _home(file: ClusterFile, flags: Flags, host: str | None, index: int, name: str) -> tuple[str, str]:
    """The host of an engine and its address: the flag's, its own, or the next of the file's."""
    if flags.host is not None:
        return _named(flags.host), flags.host
    if host is not None:
        return _node(file, host, f"{name}'s host")
    if file.hosts:
        node = list(file.hosts)[index % len(file.hosts)]
        return node, file.hosts[node].address or node
    return THIS_HOST, "127.0.0.1"


def _proxy_place(file: ClusterFile, flags: Flags, first: str) -> tuple[str, str]:
    if flags.host is not None:
        return _named(flags.host), flags.host
    if file.proxy.host is not None:
        node, address = _node(file, file.proxy.host, "proxy.host")
        # All addresses, or loopback: on the host of the first engine, where `baton up` would start it.
        return (first if node == THIS_HOST else node), address
    return first, (file.hosts[first].address or first) if first in file.hosts else "127.0.0.1"


def _node(file: ClusterFile, host: str, key: str) -> tuple[str, str]:
    """Name and address of a host that a file names at *key*.

    Raises:
        LaunchError: the file has hosts, and it is none of them.
    """
    if not file.hosts or means_here(host):
        return _named(host), host
    if host in file.hosts:
        return host, file.hosts[host].address or host
    for name, part in file.hosts.items():
        if part.address == host:
            return name, host
    close = difflib.get_close_matches(host, file.hosts, 1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(list(file.hosts)[:8])}"
    raise LaunchError(f"{key} is {host!r}, and the file's hosts have no such name or address: {hint}")


def _check_hosts(file: ClusterFile, places: Sequence[Place]) -> None:
    """
    Raises:
        LaunchError: two hosts have one address, so that one machine would be planned as two.
    """
    found = [(name, part.address or name) for name, part in file.hosts.items()]
    found += [(place.node, place.address) for place in places if place.node != THIS_HOST]
    names: dict[str, str] = {}
    for name, address in found:
        first = names.setdefault(_canonical(address), name)
        if first != name:
            raise LaunchError(
                f"the hosts {first} and {name} have one address, {address}: they would be planned as two machines; "
                "drop one of them, or correct its address"
            )


def _canonical(address: str) -> str:
    """One spelling for all of an address."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        return address.lower()


def _named(address: str) -> str:
    return THIS_HOST if means_here(address) else address


def _own(place: Place) -> tuple[int, ...] | None:
    """The devices that the file gives to an engine; a replica takes as many, further up."""
    own = place.entry.devices
    return None if own is None else tuple(number + place.replica * len(own) for number in own)


def _needs(place: Place) -> int:
    return ranks_of(place.args).workers


def _counted(flag: int | None, index: int, own: int | None, replica: int, default: int) -> int:
    """A port: counted from the flag's through the role, else from the entry's own through its replicas."""
    if flag is not None:
        return flag + index
    return own + replica if own is not None else default


def _check_port(port: int, owner: str) -> None:
    if not 0 < port < 65536:
        raise LaunchError(f"port {port} for {owner} is not a port number (1 to 65535)")
