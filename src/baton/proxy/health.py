"""Asks every instance for its health, each at its own pace: one that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from baton.proxy.breaker import ProbeRules
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.upstream import Upstream

logger = logging.getLogger("baton.proxy")

START_SECONDS = 0.25
"""Between two probes of an instance that has never been up: who starts a cluster waits for it. One that has died is
asked no more often than the others, so that a dead engine gets one request an interval."""


class Watch:
    """The probes of one proxy.

    Args:
        on_probed: called when an instance came up, and else once an interval at most.
    """

    def __init__(
        self, fleet: Fleet, upstream: Upstream, rules: ProbeRules, on_probed: Callable[[], None] = lambda: None
    ) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._rules = rules
        self._on_probed = on_probed
        self._told_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        # Set by the first probe, or when there will be none.
        self._probed: dict[str, asyncio.Event] = {}

    def start(self) -> None:
        """Watch every instance of the fleet, and no other; to be called again when it has changed."""
        known = {instance.id for instance in self._fleet}
        for name in [each for each in self._tasks if each not in known]:
            self._tasks.pop(name).cancel()
            self._probed.pop(name).set()
        for instance in self._fleet:
            if instance.id not in self._tasks:
                self._probed[instance.id] = asyncio.Event()
                self._tasks[instance.id] = asyncio.create_task(self._watch(instance))

    async def first_probe(self, instance: ProxyInstance) -> None:
        """Wait until *instance*, which is watched, was probed once, or is watched no longer."""
        probed = self._probed.get(instance.id)
        if probed is not None:
            await probed.wait()

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        for probed in self._probed.values():
            probed.set()
        self._tasks.clear()
        self._probed.clear()

    async def _watch(self, instance: ProxyInstance) -> None:
        probed = self._probed[instance.id]
        # Nobody knows anything of one that is new.
        pause = self._pause(instance) if instance.came_up or instance.probes_failed else 0.0
        while True:
            await asyncio.sleep(pause)
            came_up = instance.came_up
            try:
                await self._upstream.probe_one(instance)
                now = time.monotonic()
                if instance.came_up != came_up or now - self._told_at >= self._rules.interval_seconds:
                    self._told_at = now
                    self._on_probed()
            except Exception:
                # Whatever an engine answers: it must be asked again.
                logger.exception("a probe of %s broke", instance.id)
            probed.set()
            pause = self._pause(instance)

    def _pause(self, instance: ProxyInstance) -> float:
        """Seconds until the next probe."""
        interval = self._rules.interval_seconds
        return interval if instance.came_up else min(interval, START_SECONDS)
