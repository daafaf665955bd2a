"""Which engine of a host gets which cores and which accelerators. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from baton.cluster import Device, Instance
from baton.engine import format_cpus
from baton.launch.devices import VISIBLE, share_cpus
from baton.launch.errors import LaunchError


def allot_cpus(
    node: str, engines: Sequence[tuple[str, tuple[int, ...] | None]], pools: Sequence[Sequence[int]], *, shared: bool
) -> dict[str, tuple[int, ...]]:
    """The cores of each engine of a host.

    Args:
        node: the host's name.
        engines: name, and the cores that were asked for.
        pools: the cores of each NUMA node; empty when they are not known.
        shared: whether engines that ask for none get a share of all; else they have no cores of their own.

    Raises:
        LaunchError: somebody asks for a core that is not there.
    """
    cores = sorted({core for pool in pools for core in pool})
    shares = share_nodes(pools, len(engines)) if shared and cores else [()] * len(engines)
    given: dict[str, tuple[int, ...]] = {}
    for (name, asked), share in zip(engines, shares, strict=True):
        missing = sorted(set(asked or ()) - set(cores))
        if missing and cores:
            raise LaunchError(
                f"{name}'s cpus are {_listed(asked or ())}, and there is no core {_listed(missing)} "
                f"{'here' if node == 'localhost' else f'on {node}'}: there are {_listed(cores)}"
            )
        given[name] = asked or share
    return given


def share_nodes(pools: Sequence[Sequence[int]], engines: int) -> list[tuple[int, ...]]:
    """Cores for each engine, within one NUMA node where there are as many engines as nodes, or more.

    Fewer engines than nodes get whole nodes, neighbours together.
    """
    pools = [pool for pool in pools if pool]
    if engines < len(pools):
        groups = share_cpus(range(len(pools)), engines)
        return [tuple(core for index in group for core in pools[index]) for group in groups]
    size, rest = divmod(engines, len(pools))
    counts = [size + (1 if index < rest else 0) for index in range(len(pools))]
    return [share for pool, count in zip(pools, counts, strict=True) for share in share_cpus(pool, count)]


def allot_devices(
    node: str, engines: Sequence[tuple[str, tuple[int, ...] | None, int]], has: tuple[int, ...] | None
) -> dict[str, tuple[int, ...]]:
    """The accelerators of each engine of a host; nothing for one that has the host to itself.

    Args:
        node: the host's name.
        engines: name, the devices that were asked for, and how many it needs: one a rank.
        has: the host's devices; None when they are not known, and then they are counted from 0.

    Raises:
        LaunchError: a device has two owners or is not there, or there are too few.
    """
    if len(engines) == 1 and engines[0][1] is None and has is None:
        return {}
    owners: dict[int, str] = {}
    for name, asked, needs in engines:
        if asked is None:
            continue
        if len(asked) < needs:
            raise LaunchError(
                f"{name} has the devices {format_cpus(asked)}, {len(asked)} of them, and its ranks need {needs}: "
                "give it more, or lower its parallel sizes"
            )
        for device in asked:
            if device in owners:
                raise LaunchError(
                    f"device {device} of {node} is planned for {owners[device]} and for {name}: move one of them"
                )
            if has is not None and device not in has:
                raise LaunchError(f"{name}'s device {device} is not on {node}: there are {format_cpus(has)}")
            owners[device] = name
    given: dict[str, tuple[int, ...]] = {}
    total = sum(needs for _, asked, needs in engines if asked is None)
    free = [each for each in (has if has is not None else range(total + len(owners))) if each not in owners]
    for name, asked, needs in engines:
        if asked is None and len(free) < needs:
            raise LaunchError(
                f"{name} needs {needs} devices, and {node} has {len(free)} left of {len(has or ())}: "
                "lower its parallel sizes, or move it to another host"
            )
        given[name], free = (asked, free) if asked is not None else (tuple(free[:needs]), free[needs:])
    return given


def free_devices(
    device: Device | None, has: tuple[int, ...] | None, name: str, like: Instance, there: Sequence[Instance]
) -> tuple[int, ...]:
    """The accelerators of one more engine, as many as another one has.

    Args:
        device: what engines compute on; None when nobody said.
        has: the host's devices; None when they are not known, and then they are counted from 0.
        name: of the new one.
        like: the other one.
        there: all engines of the host.

    Raises:
        LaunchError: too few are free.
    """
    if device is Device.CPU:
        return ()
    for each in there:
        named = next((variable for variable in VISIBLE if each.environ.get(variable)), None)
        if named is not None:
            raise LaunchError(
                f"{each.id}'s environ has {named}={each.environ[named]}, so nobody here knows what is left for {name}: "
                "give devices by the key devices, or put one more server into the file and start anew"
            )
        if device is not None and not each.devices:
            raise LaunchError(
                f"{each.id} may use all devices of {each.node}, so there is none left for {name}: "
                "give it some by the key devices and start anew"
            )
    used, needs = {number for each in there for number in each.devices}, len(like.devices)
    free = [each for each in (has if has is not None else range(needs + len(used))) if each not in used]
    # Unknown ones count up without end: of these there are always enough.
    if len(free) < needs:
        raise LaunchError(
            f"{name} needs {needs} devices, and {like.node} has {len(free)} left of {len(has or ())}: "
            "stop another server first, or give the host more by its key devices and start anew"
        )
    return tuple(free[:needs])


def spare_cpus(has: Sequence[int], count: int, given: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """*count* cores of a host for one more engine: free ones first, then those that the fewest engines use.

    Args:
        has: the host's cores; empty when they are not known, and then they are those that somebody has.
        given: those of each engine there.
    """
    users = Counter(core for cores in given for core in cores)
    spare = sorted(has or users, key=lambda core: (users[core], core))
    return tuple(sorted(spare[:count]))


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
