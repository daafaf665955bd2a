"""A cluster that stays up: what ends is started again, and instances come, go, drain and start anew while it serves.

The supervisor owns processes; this owns what the cluster is to be, and its record.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.cluster import THIS_HOST, Cluster, Endpoint, Instance, Role
from baton.launch.allot import free_devices, spare_cpus
from baton.launch.cluster_run import PROXY, WAITING, here, probe_of, unknown_here
from baton.launch.commands import Command
from baton.launch.errors import LaunchError
from baton.launch.phases import STARTING
from baton.launch.ports import claims_of, instance_claims
from baton.launch.preflight import check_ports
from baton.launch.problem import Problem
from baton.launch.proxy_client import ProxyClient, ProxyRefused
from baton.launch.record import ClusterRecord, ProcessRecord, created_at, forget, runs, save, sessions_of, strays
from baton.launch.rotation import rotate
from baton.launch.shapes import ranks_of, side_channels
from baton.launch.supervisor import HASTY_SECONDS, POLL_SECONDS, Child, ChildDied, Supervisor, died, look_at

logger = logging.getLogger("baton.launch")

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
STEADY_SECONDS = 60.0
"""Who served for so long is not taken for one that fails again and again."""
ROTATE_SECONDS = 5.0
HIGHEST_PORT = 65535

Say = Callable[[str], None]


@dataclass(frozen=True)
class Keeping:
    """How a cluster is kept up.

    Attributes:
        restarts: whether what ends by itself is started again.
        start_seconds: how long one process may take to answer.
        drain_seconds: how long what is under way may go on when an instance is to go.
        log_bytes: of one log before it is moved aside.
    """

    restarts: bool = True
    start_seconds: float = 600.0
    drain_seconds: float = 120.0
    log_bytes: int = 64 << 20


@dataclass
class Fortune:
    """What became of one process before.

    Attributes:
        boots: how often it was started.
        failures: starts in a row that did not last.
        last: why the last one ended.
        again_at: when it is started again, on the monotonic clock; None when nobody waits for that.
        draining: it gets nothing new.
    """

    boots: int = 0
    failures: int = 0
    last: str | None = None
    again_at: float | None = None
    draining: bool = False


def wait_before(failures: int) -> float:
    """Seconds until a process that failed *failures* times in a row is started again: doubled each time, bounded."""
    # Bounded before it is raised: it may fail for days.
    return float(min(FIRST_WAIT_SECONDS * 2 ** min(failures - 1, 16), LONGEST_WAIT_SECONDS)) if failures else 0.0


class Operator:
    """Keeps one started cluster.

    Args:
        supervisor: of its processes.
        record: what is known of it; kept up to date on disk.
        command_of: the command of a process by its name, in the cluster as it is then.
        proxy: of the cluster.
        environ: where the record lies.
        room: what keeps the commands of more engines from being started here.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        record: ClusterRecord,
        command_of: Callable[[Cluster, str], Command],
        proxy: ProxyClient,
        *,
        keeping: Keeping,
        environ: Mapping[str, str],
        room: Callable[[list[Command]], list[Problem]] = lambda _: [],
    ) -> None:
        self.supervisor = supervisor
        self.record = record
        self._command_of = command_of
        self._proxy = proxy
        self._keeping = keeping
        self._environ = environ
        self._room = room
        self._fortunes: dict[str, Fortune] = {}
        # One change at a time; looking is always allowed.
        self._change = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        self._open = False
        self._wake = asyncio.Event()
        self._reviving: dict[str, asyncio.Task[None]] = {}

    @property
    def cluster(self) -> Cluster:
        return self.record.cluster

    async def begin(self, left: Sequence[ProcessRecord] = ()) -> None:
        """Take over what still runs of *left*, the processes that a supervisor which is gone had, and start the rest.

        What those that died have left is ended before, and their logs are kept.
        """
        known = {process.name: process for process in left if runs(process)}
        if left:
            for name in here(self.cluster, self.record.node):
                self.fortune(name).boots = 1
            for each in left:
                self.fortune(each.name).boots = each.boots
            await self.supervisor.sweep(sessions_of(known.values()))
        save(self.record, self._environ)
        for name in here(self.cluster, self.record.node):
            process = known.get(name)
            if process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self.supervisor.adopt(process, probe_of(self.cluster, name))
                    continue
            await self._start(name, STARTING if name != PROXY else WAITING)
        self.write()
        if known:
            await self._recall_drained(known)

    def opens(self) -> None:
        """Take changes from now on: all of it has answered."""
        self._open = True

    async def close(self) -> None:
        """End what is under way, then every process, and forget the cluster: its one end, by whatever way it comes."""
        self._open = False
        tasks = [*self._changes, *self._reviving.values()]
        for task in tasks:
            task.cancel()
        # Only now does nobody start anything any more.
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.supervisor.stop()
        # What could not be ended is still to be found by `baton down`.
        if not strays(self.record.run):
            forget(self.record, self._environ)

    def write(self) -> None:
        """Bring the record on disk up to date."""
        processes = tuple(
            ProcessRecord(
                name=child.name,
                pid=child.process.pid,
                created=created_at(child.process.pid),
                log=child.log,
                boots=child.boots,
                served=child.ready_after is not None,
            )
            for child in self.supervisor.children
        )
        self.record = self.record.model_copy(update={"processes": processes})
        save(self.record, self._environ)

    async def keep(self) -> None:
        """Watch until cancelled.

        Raises:
            ChildDied: a process ended by itself, and none is to be started again.
        """
        rotating = asyncio.create_task(self._rotate_forever())
        try:
            while True:
                await self._until_something_ends()
                for child in self.supervisor.ended():
                    if not self._keeping.restarts:
                        raise died(child)
                    self._revive(child)
        finally:
            rotating.cancel()
            await asyncio.gather(rotating, return_exceptions=True)

    async def _until_something_ends(self) -> None:
        self._wake.clear()
        watched = [child for child in self.supervisor.children if child.ending is None]
        waits = [asyncio.ensure_future(child.process.wait()) for child in watched]
        waits.append(asyncio.ensure_future(self._wake.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _revive(self, child: Child) -> None:
        """Clear away what a process that ended has left, and start it again: in a task that `_stop` can call off.

        All that others must know is so when this returns: there is no moment at which nobody owns its next start.
        """
        name, said, fortune = child.name, str(died(child)), self.fortune(child.name)
        steady = child.ready_after is not None and child.seconds_ready > STEADY_SECONDS
        fortune.failures = 1 if steady else fortune.failures + 1
        fortune.last = said
        seconds = wait_before(fortune.failures)
        fortune.again_at = time.monotonic() + seconds
        logger.warning("%s; it is started again in %.1f s", said, seconds)
        cleared = self.supervisor.end(child, HASTY_SECONDS)

        async def revive() -> None:
            await cleared
            self.write()
            await asyncio.sleep(seconds)
            fortune.again_at = None
            child = await self._start(name)
            # Whether it dies on the way is seen by keep(), which buries it.
            with contextlib.suppress(ChildDied):
                await self._until_ready(child)
                if name == PROXY:
                    await self._drain_again()

        task = asyncio.create_task(revive())
        # The one that started this child, and still waits for its first answer, is done as well.
        if (former := self._reviving.get(name)) is not None:
            former.cancel()
        self._reviving[name] = task
        task.add_done_callback(lambda done: self._revived(name, done))

    def _revived(self, name: str, task: asyncio.Task[None]) -> None:
        if self._reviving.get(name) is task:
            del self._reviving[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s was not started again: %s", name, error)
            self.fortune(name).last = str(error)

    async def _start(self, name: str, phase: str = STARTING) -> Child:
        command, fortune = self._command_of(self.cluster, name), self.fortune(name)
        fortune.boots += 1
        child = await self.supervisor.start(name, command, probe_of(self.cluster, name), phase, fortune.boots)
        self.write()
        self._wake.set()
        return child

    async def _until_ready(self, child: Child) -> None:
        """
        Raises:
            ChildDied: it ended first.
            LaunchError: it took too long; it runs on.
        """
        deadline = time.monotonic() + self._keeping.start_seconds
        while child.ready_after is None:
            if child.process.returncode is not None:
                raise died(child)
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{child.name} does not answer after {self._keeping.start_seconds:g} s ({child.phase}): see its "
                    f"log, {child.log}"
                )
            await look_at(child)
            if child.ready_after is None:
                await asyncio.sleep(POLL_SECONDS)
        self.write()

    async def _rotate_forever(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_SECONDS)
            for child in self.supervisor.children:
                if rotate(child.log, self._keeping.log_bytes):
                    child.read_to = 0

    def fortune(self, name: str) -> Fortune:
        return self._fortunes.setdefault(name, Fortune())

    def status(self) -> list[dict[str, Any]]:
        """What is known here of each process: its name, what it does, since when, and how it fared."""
        rows, children = [], {each.name: each for each in self.supervisor.children if each.ending is None}
        engines = {each.id: each for each in self.cluster.instances}
        for name in here(self.cluster, self.record.node):
            endpoint, child, fortune = engines.get(name), children.get(name), self.fortune(name)
            rows.append(
                {
                    "id": name,
                    "role": PROXY if endpoint is None else str(endpoint.role),
                    "url": self._proxy.url if endpoint is None else endpoint.url,
                    "state": state_of(child, fortune),
                    "pid": None if child is None else child.process.pid,
                    "seconds": None if child is None else round(time.monotonic() - child.started, 1),
                    "boots": fortune.boots,
                    "failures": fortune.failures,
                    "last_failure": fortune.last,
                    "restart_in_seconds": None
                    if fortune.again_at is None
                    else round(max(0.0, fortune.again_at - time.monotonic()), 1),
                    "log": str(self.supervisor.logs / f"{name}.log"),
                }
            )
        return rows

    # changes

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """One change, made by a task of its own, which is cancelled when all of it ends.

        Raises:
            LaunchError: it is still starting.
        """
        if not self._open:
            raise LaunchError("the cluster is still starting: `baton status` tells how far it is; then try again")
        task = asyncio.current_task()
        assert task is not None
        self._changes.add(task)
        try:
            async with self._change:
                yield
        finally:
            self._changes.discard(task)

    async def scale(self, wanted: Mapping[Role, int], say: Say) -> None:
        """Start or stop instances until there are as many of each role as *wanted*.

        Raises:
            LaunchError: there is no room for them, or one did not come up.
            ProxyRefused: the proxy does not go along; what was started for it has been stopped.
        """
        async with self._changing():
            for role, count in wanted.items():
                if count < 1:
                    raise LaunchError(f"--{role} {count}: a cluster needs at least one {role} server")
            for role, count in wanted.items():
                have = [each for each in self.cluster.on(self.record.node) if each.role is role]
                if count == len(have):
                    say(f"there are {count} {role} servers already")
                if count > len(have):
                    await self._grow(role, count - len(have), say)
                for instance in reversed(have[count:]):
                    await self._drain(instance, say)
                    await self._proxy.remove(instance.url)
                    await self._stop(instance.id)
                    others = tuple(each for each in self.cluster.instances if each.id != instance.id)
                    self._become(others)
                    # Another one of its name starts with a clean slate.
                    del self._fortunes[instance.id]
                    say(f"{instance.id} is stopped")

    async def _grow(self, role: Role, more: int, say: Say) -> None:
        fresh: list[Instance] = []
        for _ in range(more):
            fresh.append(next_instance(self.cluster, role, fresh, self.record.node, is_free))
        # All of it is checked before any of it is started.
        grown = ordered((*self.cluster.instances, *fresh))
        claims = [claim for each in fresh for claim in instance_claims(each)]
        problems = check_ports((claim.host, claim.port, claim.owner) for claim in claims)
        larger = self.cluster.model_copy(update={"instances": grown})
        problems += self._room([self._command_of(larger, each.id) for each in fresh])
        if problems:
            raise LaunchError("; ".join(problem.what for problem in problems))
        before = self.cluster.instances
        self._become(grown)
        try:
            children = [await self._start(each.id) for each in fresh]
            say(f"starting {', '.join(each.id for each in fresh)}")
            await asyncio.gather(*map(self._until_ready, children))
            for each in fresh:
                await self._proxy.add(as_endpoint(each))
                say(f"{each.id} serves at {each.url}")
        except Exception:
            for each in fresh:
                # The proxy may have taken in some of them.
                with contextlib.suppress(ProxyRefused):
                    await self._proxy.drain(each.url, self._keeping.drain_seconds)
                    await self._proxy.remove(each.url)
                await self._stop(each.id)
                self._fortunes.pop(each.id, None)
            self._become(before)
            raise

    async def drain(self, names: list[str], say: Say) -> None:
        """Have instances finish what they do, and get nothing new.

        Raises:
            LaunchError: there is none of that name.
            ProxyRefused: the proxy does not go along.
        """
        async with self._changing():
            for instance in self._named(names):
                await self._drain(instance, say)

    async def restart(self, names: list[str], say: Say) -> None:
        """Start processes anew, one after the other, each drained before.

        Raises:
            LaunchError: there is none of that name, or it does not come up.
            ProxyRefused: the proxy does not go along.
        """
        async with self._changing():
            if PROXY in names and PROXY not in here(self.cluster, self.record.node):
                raise LaunchError(unknown_here(self.cluster, self.record.node, PROXY))
            chosen = self._named([name for name in names if name != PROXY])
            for instance in chosen:
                await self._drain(instance, say)
                await self._restart(instance.id, say)
                await self._proxy.add(as_endpoint(instance))
                self.fortune(instance.id).draining = False
                say(f"{instance.id} serves again")
            if PROXY in names:
                await self._restart(PROXY, say)
                await self._drain_again()
                say("the proxy serves again")

    async def _restart(self, name: str, say: Say) -> None:
        await self._stop(name)
        say(f"{name} is stopped; starting it again")
        self.fortune(name).failures = 0
        try:
            await self._until_ready(await self._start(name))
        except ChildDied as error:
            raise LaunchError(f"{error}; it is tried again and again") from error

    async def _drain(self, instance: Instance, say: Say) -> None:
        others = [each for each in self.cluster.of_role(instance.role) if each.id != instance.id]
        if not any(not self.fortune(each.id).draining for each in others):
            say(f"{instance.id} is the only {instance.role} server in use: requests are refused while it is away")
        self.fortune(instance.id).draining = True
        say(f"draining {instance.id}")
        if await self._proxy.drain(instance.url, self._keeping.drain_seconds):
            say(f"{instance.id} has nothing under way")
        else:
            say(f"{instance.id} is not done after {self._keeping.drain_seconds:g} s: what is left is cut off")

    async def _drain_again(self) -> None:
        """Tell a proxy that was started anew who is to get nothing."""
        for each in self.cluster.on(self.record.node):
            if self.fortune(each.id).draining:
                with contextlib.suppress(ProxyRefused):
                    await self._proxy.drain(each.url, 0.0)

    async def _recall_drained(self, left: Mapping[str, ProcessRecord]) -> None:
        """Find out from a proxy that is older than this supervisor who is to get nothing.

        One that was drained to be restarted, and is not among those *left*, is taken back: it has been started anew.
        """
        with contextlib.suppress(ProxyRefused):
            drained = {row["url"] for row in await self._proxy.instances() if row.get("draining")}
            for each in self.cluster.on(self.record.node):
                if each.url in drained and each.id not in left:
                    await self._proxy.add(as_endpoint(each))
                else:
                    self.fortune(each.id).draining = each.url in drained

    async def _stop(self, name: str) -> None:
        """End a process, and the plan to start it."""
        # What it had started may end meanwhile, and be planned anew.
        while (reviving := self._reviving.pop(name, None)) is not None:
            reviving.cancel()
            await asyncio.gather(reviving, return_exceptions=True)
        self.fortune(name).again_at = None
        child = self.supervisor.child(name)
        if child is not None:
            await self.supervisor.end(child)
            self.write()

    def _become(self, instances: tuple[Instance, ...]) -> None:
        cluster = self.cluster.model_copy(update={"instances": instances})
        self.record = self.record.model_copy(update={"cluster": cluster})
        self.write()

    def _named(self, names: list[str]) -> list[Instance]:
        by_name = {each.id: each for each in self.cluster.on(self.record.node)}
        for name in names:
            if name == PROXY in here(self.cluster, self.record.node):
                raise LaunchError("the proxy is no instance that could be drained: there are " + ", ".join(by_name))
            if name not in by_name:
                raise LaunchError(unknown_here(self.cluster, self.record.node, name))
        return [by_name[name] for name in names]


def state_of(child: Child | None, fortune: Fortune) -> str:
    """One word for how it is with a process."""
    if child is None:
        return "restarting" if fortune.again_at is not None else "stopped"
    if child.ready_after is None:
        return child.phase
    return "draining" if fortune.draining else "ready"


def ordered(instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
    """Prefill servers first, each role in its order."""
    return tuple(sorted(instances, key=lambda each: each.role is not Role.PREFILL))


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    return not check_ports([(host, port, "")])


def next_instance(
    cluster: Cluster,
    role: Role,
    beside: Sequence[Instance],
    node: str = THIS_HOST,
    free: Callable[[str, int], bool] = lambda *_: True,
) -> Instance:
    """One more instance of *role* on *node*, as the last one there, with a name and ports of its own.

    Args:
        beside: others that are new as well.
        free: whether nobody else has a port of that host; those that are not are stepped over.

    Raises:
        LaunchError: there are no ports or devices left, or none of the role is there.
    """
    every = (*cluster.instances, *beside)
    same = [each for each in every if each.role is role and each.node == node]
    if not same:
        raise LaunchError(f"there is no {role} server on {node} that another one could be like")
    number = 1 + max((int(each.id[1:]) for each in every if each.role is role and each.id[1:].isdigit()), default=-1)
    taken = {claim.port for claim in claims_of(cluster.model_copy(update={"instances": every})) if claim.node == node}
    last = same[-1]
    port = max(each.port for each in same) + 1
    while port <= HIGHEST_PORT and (port in taken or not free(last.host, port)):
        port += 1
    width = _after(last) - last.side_channel_port
    side = max(map(_after, same))
    while side + width - 1 <= HIGHEST_PORT and any(
        each in taken or each == port or not free(last.side_channel_host, each) for each in range(side, side + width)
    ):
        side += 1
    if max(port, side + width - 1) > HIGHEST_PORT:
        raise LaunchError(f"there are no ports left for one more {role} server")
    name = f"{role.letter}{number}"
    here = [each for each in every if each.node == node]
    devices = free_devices(cluster.device, cluster.devices.get(node), name, last, here)
    cpus = spare_cpus(cluster.cpus.get(node, ()), len(last.cpus), [each.cpus for each in here])
    return last.model_copy(
        update={"id": name, "port": port, "side_channel_port": side, "devices": devices, "cpus": cpus}
    )


def _after(instance: Instance) -> int:
    """The first port after its side channel's."""
    return max(side_channels(instance.side_channel_port, ranks_of(instance.engine_args))) + 1


def as_endpoint(instance: Instance) -> Endpoint:
    """What the proxy must know of it."""
    return Endpoint(role=instance.role, host=instance.host, port=instance.port, tls=instance.tls)
