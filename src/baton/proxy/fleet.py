"""The instances, whether each is usable, and what is in flight on each: the only owner of that state."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from baton.cluster import Endpoint, Role
from baton.http import Header

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
        named: the header by which an answer names it.
    """

    endpoint: Endpoint
    id: str
    place: int
    usable: bool = False
    in_flight: int = 0
    outages: int = 0
    came_up: int = 0
    named: Header = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.named = (f"x-baton-{self.endpoint.role}".encode(), self.id.encode())

    def set_usable(self, usable: bool, why: str) -> None:
        if usable != self.usable:
            logger.log(
                logging.INFO if usable else logging.WARNING, "%s is %s: %s", self.id, "usable" if usable else "out", why
            )
            if not usable:
                self.outages += 1
            self.came_up += usable
        self.usable = usable


class Fleet:
    """All instances by role."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.pools: dict[Role, list[ProxyInstance]] = {role: [] for role in Role}
        for endpoint in endpoints:
            pool = self.pools[endpoint.role]
            place = len(pool)
            pool.append(ProxyInstance(endpoint, f"{endpoint.role.letter}{place}", place))

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
        """Whether each role has a usable instance."""
        return all(any(instance.usable for instance in pool) for pool in self.pools.values())

    def __iter__(self) -> Iterator[ProxyInstance]:
        for pool in self.pools.values():
            yield from pool
