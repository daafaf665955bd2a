"""Instances that come and go while the proxy runs: by its admin API, by a file, and in all workers alike.

The first worker decides, numbers and tells; the others pass on what they are asked and take what they are told. What is
told is the whole set with a version, so that a worker that missed something, or was started again, only has to ask.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from baton.cluster import Endpoint, Role
from baton.proxy import instances_file
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance, Taken
from baton.proxy.forever import forever
from baton.proxy.health import Watch
from baton.proxy.instances_file import BadInstancesFile
from baton.proxy.journey import Way
from baton.proxy.workers import Peers

logger = logging.getLogger("baton.proxy")

DRAIN_SECONDS = 600.0
LOOK_SECONDS = 0.1
FOLLOW_SECONDS = 2.0
FILE_SECONDS = 1.0
FLEET_PATH = "/fleet"
"""Where workers tell each other of the fleet."""


class Members:
    """Who is in the fleet.

    Args:
        way: the fleet, its connections and its metrics.
        watch: probes whoever is in it.
        peers: the other workers of this proxy.
        first: the worker that decides; None when this one does.
        waiting: requests that have chosen an instance and are not on it yet.
        own: the proxy's own address, host and port: it cannot be its own engine.
    """

    def __init__(
        self,
        way: Way,
        watch: Watch,
        peers: Peers,
        *,
        first: Peers | None = None,
        waiting: Callable[[ProxyInstance], int] = lambda _: 0,
        own: tuple[str, int] | None = None,
    ) -> None:
        self._fleet = way.fleet
        self._metrics = way.metrics
        self._watch = watch
        self._peers = peers
        self.first = first
        self.waiting = waiting
        self._own = own
        self._version = 0
        self._drains: dict[str, asyncio.Task[None]] = {}
        # How the file was when it was read last (None: it is to be read), and when it was looked at last.
        self._taken: instances_file.Stamp | None = None
        self._last: instances_file.Stamp | None = None
        # At an address that the file wants for another.
        self._in_the_way: ProxyInstance | None = None

    # asked by an operator

    async def add(self, endpoint: Endpoint) -> tuple[ProxyInstance, bool]:
        """Take an instance in, probe it once and tell all workers; one that is draining is taken back.

        Returns:
            It, and whether it is new.

        Raises:
            ProxyError: 409, there is one at that address; 400, it is the proxy itself.
        """
        self._check_foreign(endpoint)
        there = self._fleet.at(endpoint)
        if there is not None and there.draining and there.endpoint == endpoint:
            self._take_back(there)
            await self._tell()
            return there, False
        try:
            instance = self._fleet.add(endpoint)
        except Taken as error:
            raise ProxyError(409, str(error)) from None
        # Before anything is waited for: whoever asked may leave, and the instance stays.
        self._watch.start()
        logger.info("%s is new: a %s server at %s", instance.id, endpoint.role, endpoint.url)
        await asyncio.gather(self._watch.first_probe(instance), self._tell())
        return instance, True

    async def remove(self, name: str) -> ProxyInstance:
        """Let an instance go at once; what is in flight on it goes on to its end.

        Raises:
            ProxyError: 404, there is none of that name.
        """
        instance = self.named(name)
        self._remove(instance)
        await self._tell()
        return instance

    async def drain(self, name: str, seconds: float = DRAIN_SECONDS, *, remove: bool = False) -> ProxyInstance:
        """Give an instance no new work, and wait in the background for what it has: requests, and blocks for others.

        Args:
            seconds: how long to wait.
            remove: whether it leaves the fleet then, also when the time was too short.

        Raises:
            ProxyError: 404, there is none of that name.
        """
        instance = self.named(name)
        self._start_drain(instance, seconds, remove=remove)
        await self._tell()
        return instance

    def named(self, name: str) -> ProxyInstance:
        """
        Raises:
            ProxyError: 404, there is none of that name.
        """
        instance = self._fleet.get(name)
        if instance is None:
            known = ", ".join(each.id for each in self._fleet) or "none"
            raise ProxyError(404, f"there is no instance {name!r}: {known} are known")
        return instance

    # told by a file

    async def take_file(self, endpoints: Sequence[Endpoint]) -> bool:
        """Make the fleet what a file says; those that came another way stay. Who goes is drained, then removed.

        Returns:
            Whether that changed it.

        Raises:
            BadInstancesFile: it contradicts one that came another way; nothing was changed.
        """
        change = instances_file.change([each.endpoint for each in self._fleet if each.filed], endpoints)
        gone = {endpoint.authority for endpoint in change.gone}
        for endpoint in change.added:
            there = self._fleet.at(endpoint)
            if there is not None and there.endpoint != endpoint and endpoint.authority not in gone:
                self._in_the_way = there
                raise BadInstancesFile(f"{endpoint.authority} is {there.id}, a {there.endpoint.role} server, already")
            try:
                self._check_foreign(endpoint)
            except ProxyError as error:
                raise BadInstancesFile(error.message) from None
        for endpoint in change.gone:
            there = self._fleet.at(endpoint)
            if there is None:
                continue
            there.filed = False
            if any(endpoint.authority == each.authority for each in change.added):
                # It comes back in another role: its address is needed.
                self._remove(there)
            else:
                self._start_drain(there, DRAIN_SECONDS, remove=True)
        for endpoint in endpoints:
            there = self._fleet.at(endpoint)
            if there is None:
                there = self._fleet.add(endpoint)
            elif endpoint in change.added and there.draining:
                self._take_back(there)
            there.filed = True
        self._watch.start()
        self._in_the_way = None
        if change.added or change.gone:
            logger.info("instances: %d new, %d kept, %d go", *map(len, (change.added, change.kept, change.gone)))
            await self._tell()
        return bool(change.added or change.gone)

    def came_from_file(self) -> None:
        """The fleet was made from it."""
        for instance in self._fleet:
            instance.filed = True

    async def reload(self, path: Path, *, news: bool = True) -> None:
        """Read the file again; a bad one changes nothing, and is logged and counted.

        Args:
            news: whether it is known to be another; else one that says the same is not counted.
        """
        try:
            changed = await self.take_file(instances_file.read(path))
        except BadInstancesFile as error:
            self._metrics.reloads.inc("refused")
            logger.error("the instances stay as they are: %s", error)
        else:
            if news or changed:
                self._metrics.reloads.inc("ok")

    async def watch_file_forever(self, path: Path) -> None:
        """Read the file again whenever it has changed, and stood still since: half a file may look like a whole one.

        It is read at first in any case: nobody knows how it was when its instances were taken. And again when an
        instance is gone that was in the way of what it says.
        """
        self._last = instances_file.stamp(path)
        await forever(FILE_SECONDS, partial(self._look_at_file, path))

    async def _look_at_file(self, path: Path) -> None:
        now, last = instances_file.stamp(path), self._last
        self._last = now
        if now == last and now != self._taken:
            before, self._taken = self._taken, now
            await self.reload(path, news=before is not None)

    # the other workers

    def snapshot(self) -> dict[str, Any]:
        """The fleet, as workers tell it each other."""
        return {
            "version": self._version,
            "numbers": {str(role): number for role, number in self._fleet.numbers.items()},
            "instances": [
                {
                    "number": each.place,
                    "role": each.endpoint.role,
                    "url": each.endpoint.url,
                    "draining": each.draining,
                    "drained": each.drained,
                    "leaving": each.leaving,
                    "filed": each.filed,
                }
                for each in self._fleet
            ],
        }

    def adopt(self, told: dict[str, Any]) -> None:
        """Become what another worker says, when that is newer."""
        if told["version"] <= self._version:
            return
        self._version = told["version"]
        wanted = {(each["role"], each["number"]): each for each in told["instances"]}
        for instance in list(self._fleet):
            if (instance.endpoint.role, instance.place) not in wanted:
                self._fleet.remove(instance)
        for (role, number), row in wanted.items():
            endpoint = Endpoint.from_url(Role(role), row["url"])
            there = self._fleet.at(endpoint) or self._fleet.add(endpoint, number)
            if there.draining != row["draining"]:
                there.drain(row["draining"], leaving=row["leaving"])
            there.drained, there.filed = row["drained"], row["filed"]
            if self.first is None and there.draining and not there.drained and there.id not in self._drains:
                # The one that waited for it is gone, and this one has its place.
                self._start_drain(there, DRAIN_SECONDS, remove=there.leaving)
        for role in Role:
            self._fleet.numbers[role] = max(self._fleet.numbers[role], told["numbers"][role])
        self._watch.start()

    async def catch_up(self) -> None:
        """Take over the newest set that another worker has."""
        for raw in await (self.first or self._peers).ask(FLEET_PATH, quiet=True):
            self.adopt(orjson.loads(raw))

    @property
    def changed(self) -> bool:
        """Whether the fleet is another than the one that this proxy was started with."""
        return self._version > 0

    async def follow_forever(self) -> None:
        """Catch up now and then with what was told and not heard."""
        await forever(FOLLOW_SECONDS, self.catch_up)

    def close(self) -> None:
        for task in self._drains.values():
            task.cancel()
        if self.first is not None:
            self.first.close()

    def _tell(self) -> Coroutine[Any, Any, None]:
        """To be awaited; counted at once, so that who misses it since nobody awaits it any more asks for it."""
        self._version += 1
        return self._peers.tell(FLEET_PATH, orjson.dumps(self.snapshot()))

    # draining

    def _start_drain(self, instance: ProxyInstance, seconds: float, *, remove: bool) -> None:
        running = self._drains.pop(instance.id, None)
        if running is not None:
            running.cancel()
        instance.drain(True, leaving=remove)
        task = asyncio.create_task(self._drain(instance, seconds, remove=remove))
        self._drains[instance.id] = task

    async def _drain(self, instance: ProxyInstance, seconds: float, *, remove: bool) -> None:
        until = time.monotonic() + seconds
        while (busy := await self._busy(instance)) and time.monotonic() < until:
            await asyncio.sleep(LOOK_SECONDS)
        self._drains.pop(instance.id, None)
        if instance.removed:
            return
        if busy:
            instance.last_error = f"not drained after {seconds:g} s: {busy} requests or tickets are still out"
            logger.warning("%s is %s", instance.id, instance.last_error)
        else:
            instance.drained = True
            logger.info("%s is drained", instance.id)
        if remove:
            self._remove(instance)
        await self._tell()

    async def _busy(self, instance: ProxyInstance) -> int:
        """What an instance still has to do for somebody, in all workers."""
        own = load_of(instance, self._fleet, self.waiting)
        if own:
            return own
        total = 0
        for other in await self._peers.ask("/instances"):
            for row in orjson.loads(other)["instances"]:
                if row["id"] == instance.id:
                    total += row["in_flight"] + row["held"] + row["waiting"]
        return total

    def _take_back(self, instance: ProxyInstance) -> None:
        running = self._drains.pop(instance.id, None)
        if running is not None:
            running.cancel()
        instance.drain(False)

    def _remove(self, instance: ProxyInstance) -> None:
        running = self._drains.pop(instance.id, None)
        if running is not None:
            running.cancel()
        self._fleet.remove(instance)
        self._watch.start()
        if instance is self._in_the_way:
            # What the file says may be done now.
            self._in_the_way = self._taken = None
        logger.info("%s is removed", instance.id)

    def _check_foreign(self, endpoint: Endpoint) -> None:
        if self._own is not None and is_own(endpoint, *self._own):
            raise ProxyError(400, f"{endpoint.authority} is this proxy's own address")


def load_of(instance: ProxyInstance, fleet: Fleet, waiting: Callable[[ProxyInstance], int]) -> int:
    """Requests on an instance, requests that have chosen it, and tickets whose blocks it holds."""
    return instance.in_flight + waiting(instance) + fleet.held(instance)


def is_own(endpoint: Endpoint, host: str, port: int) -> bool:
    """Whether an engine's address is that of a proxy that listens on *host* and *port*."""
    return endpoint.port == port and endpoint.host in (host, "127.0.0.1", "localhost", "::1")
