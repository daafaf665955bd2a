"""The instances, whether each is usable, and what is in flight on each: the only owner of that state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.cluster import Endpoint, Role, TransferMode
from baton.http import Header
from baton.proxy.engine_info import EngineInfo, disagreement

logger = logging.getLogger("baton.proxy")


class NoInstance(Exception):
    """No instance of a role is usable."""

    def __init__(self, role: Role, known: int) -> None:
        super().__init__(f"no {role} server is usable ({known} known)")
        self.role = role


@dataclass
class ProxyInstance:
    """One engine, and what the proxy knows of it.

    Attributes:
        endpoint: where it is and what it does.
        id: ``P0``, ``D1``: role and place.
        place: its place among its role, which never changes.
        usable: whether it answered last time it was asked or used.
        in_flight: requests on it now.
        outages: how often it went out.
        came_up: how often it became usable: another start has other connections.
        info: what it is, as it said itself; None when nothing is known.
        learned: whether it has been asked what it is since it became usable or showed to be another.
        named: the header by which an answer names it.
    """

    endpoint: Endpoint
    id: str
    place: int
    usable: bool = False
    in_flight: int = 0
    outages: int = 0
    came_up: int = 0
    info: EngineInfo | None = None
    learned: bool = False
    changed: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    _turn: int = field(default=0, repr=False)
    named: Header = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.named = (f"x-baton-{self.endpoint.role}".encode(), self.id.encode())

    def set_usable(self, usable: bool, why: str) -> None:
        if usable != self.usable:
            logger.log(
                logging.INFO if usable else logging.WARNING, "%s is %s: %s", self.id, "usable" if usable else "out", why
            )
            self.usable = usable
            self.came_up += usable
            if not usable:
                self.outages += 1
                # It may come back as another.
                self.info, self.learned = None, False
            self.changed()

    def set_info(self, info: EngineInfo | None) -> None:
        """It is *info*."""
        self.info = info
        self.changed()

    def hear(self, params: Mapping[str, Any]) -> None:
        """It gave this ticket: when another engine speaks there than was known, it is asked again what it is."""
        if self.info is not None and self.info.names(params.get("remote_engine_id")):
            return
        self.learned = self.learned and self.info is None
        self.correct(params)

    def correct(self, params: Mapping[str, Any]) -> None:
        """It, or the one rank of it that can be reached here, is what this ticket of its says."""
        said = EngineInfo.from_ticket(params)
        if said is not None:
            self.set_info(said)

    def doubt(self) -> None:
        """What is known of it may have misled somebody: forget it, and ask again."""
        self.learned = False
        self.set_info(None)

    @property
    def ranks(self) -> int | None:
        """How many data-parallel ranks it has; None when it has not said."""
        return self.info.dp_size if self.info is not None else None

    def next_rank(self) -> int:
        """One of its data-parallel ranks, each in its turn."""
        assert self.info is not None
        self._turn = (self._turn + 1) % self.info.dp_size
        return self._turn


class Fleet:
    """All instances by role.

    Args:
        wanted: the transfer mode that the user insists on; None finds it out.

    Attributes:
        mode: what the usable instances are; read mode while none has said, None when they differ.
        conflict: who differs, in words; None when nobody does.
    """

    def __init__(self, endpoints: Sequence[Endpoint], wanted: TransferMode | None = None) -> None:
        self._wanted = wanted
        self.mode: TransferMode | None = wanted or TransferMode.READ
        self.conflict: str | None = None
        self.pools: dict[Role, list[ProxyInstance]] = {role: [] for role in Role}
        for endpoint in endpoints:
            pool = self.pools[endpoint.role]
            place = len(pool)
            pool.append(ProxyInstance(endpoint, f"{endpoint.role.letter}{place}", place, changed=self._settle))

    def usable(self, role: Role) -> Sequence[ProxyInstance]:
        """The usable instances of *role*, in order.

        Raises:
            NoInstance: there is none.
        """
        pool = self.pools[role]
        for instance in pool:
            if not instance.usable:
                break
        else:
            if pool:
                return pool
        usable = [instance for instance in pool if instance.usable]
        if not usable:
            raise NoInstance(role, len(pool))
        return usable

    def ready(self) -> bool:
        """Whether each role has a usable instance, and they can hand over."""
        return self.conflict is None and all(any(instance.usable for instance in pool) for pool in self.pools.values())

    def _settle(self) -> None:
        """Find out the transfer mode: an instance has changed."""
        modes = {each.id: each.info.transfer_mode for each in self if each.usable and each.info is not None}
        conflict = disagreement(modes, self._wanted)
        if conflict is not None and conflict != self.conflict:
            logger.error("nothing can be handed over: %s", conflict)
        self.conflict = conflict
        if conflict is not None:
            self.mode = None
        elif self._wanted is not None:
            self.mode = self._wanted
        else:
            self.mode = next(iter(modes.values()), TransferMode.READ)

    def __iter__(self) -> Iterator[ProxyInstance]:
        for pool in self.pools.values():
            yield from pool
