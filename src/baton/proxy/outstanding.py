"""Tickets that are out: given by a prefill server, and not yet known to be used. The only owner of that knowledge.

Pure but for its clock. A ticket is out from the prefill server's answer until the decode server's first byte says that
the blocks were moved, or until a decode server has been told to give it up; one that no decode server can be told of
stays out until its lease must be over.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from baton.proxy.engine_info import LEASE_SECONDS
from baton.proxy.fleet import ProxyInstance
from baton.proxy.ticket import Ticket

USABLE = 2 / 3
"""The part of a lease during which its ticket is used: the rest is for the decode server, which must admit the request
and meet the prefill server before it can renew the lease."""


class Outstanding:
    """Tickets that are out, by the prefill server that gave them.

    Args:
        max_age_seconds: how old a ticket may be when it is used; None goes by the lease.
        clock: in seconds, monotonic.

    Attributes:
        given, used, dropped, expired: tickets so far, by the instance's id; given is the sum of the rest and of those
            that are out. Dropped were not used: a decode server had them freed, or their engine is no more. Expired
            were left to the end of their lease.
    """

    def __init__(self, max_age_seconds: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age = max_age_seconds
        self._clock = clock
        self.given: Counter[str] = Counter()
        self.used: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.expired: Counter[str] = Counter()
        # In the order in which they were given; by identity, since a ticket's parameters may be anything.
        self._out: dict[str, dict[int, Ticket]] = {}
        # Left to their lease: when it must be over, and whose they are.
        self._left: dict[int, tuple[float, Ticket]] = {}

    def usable_until(self, ticket: Ticket, giver: ProxyInstance) -> float:
        """Until when a ticket may be sent to a decode server, on the monotonic clock.

        It is reckoned from when the ticket was here. When the lease began, the prefill server alone knows: it says so
        in no ticket (vLLM 0.32, nixl/pull_scheduler.py: ``remote_blocks_expiry_time`` stands in decode servers' tickets
        only), and by its own process's clock.
        """
        if self._max_age is not None:
            return ticket.given_at + self._max_age
        # lease_of(), without the call: every request asks
        info = giver.info
        return ticket.given_at + (LEASE_SECONDS if info is None else info.lease_seconds) * USABLE

    def give(self, ticket: Ticket, giver: ProxyInstance) -> None:
        """*giver* has answered with *ticket*."""
        ticket.giver = giver.id
        self.given[giver.id] += 1
        out = self._out.get(giver.id)
        if out is None:
            out = self._out[giver.id] = {}
        out[id(ticket)] = ticket

    def use(self, ticket: Ticket) -> None:
        """A decode server has what it is good for."""
        out = self._out.get(ticket.giver)
        if out is not None and out.pop(id(ticket), None) is not None:
            self.used[ticket.giver] += 1

    def drop(self, ticket: Ticket) -> None:
        """It will not be used, and a decode server has been told so; nothing when it was used."""
        if self._take(ticket):
            self.dropped[ticket.giver] += 1

    def leave(self, ticket: Ticket, giver: ProxyInstance) -> None:
        """It will not be used, and nobody could be told: the blocks stay until the lease is over."""
        if id(ticket) in self._out.get(ticket.giver, ()):
            self._left[id(ticket)] = (ticket.given_at + lease_of(giver), ticket)

    def void(self, giver: ProxyInstance) -> None:
        """*giver* is another engine now: what the one before gave is worth nothing, and holds nothing."""
        for ticket in list(self._out.get(giver.id, {}).values()):
            self.drop(ticket)

    def count(self, instance_id: str) -> int:
        """Tickets of a prefill server that are out."""
        self._expire()
        return len(self._out.get(instance_id, ()))

    def oldest_seconds(self, instance_id: str) -> float:
        """The age of the oldest of them; 0 when there is none."""
        self._expire()
        for ticket in self._out.get(instance_id, {}).values():
            return self._clock() - ticket.given_at
        return 0.0

    def _take(self, ticket: Ticket) -> bool:
        """Whether it was out, and is no longer."""
        out = self._out.get(ticket.giver)
        if out is None or out.pop(id(ticket), None) is None:
            return False
        if self._left:
            self._left.pop(id(ticket), None)
        return True

    def _expire(self) -> None:
        """Forget tickets whose lease must be over. All are looked at: leases differ in length."""
        now = self._clock()
        for until, ticket in list(self._left.values()):
            if until <= now:
                if self._take(ticket):
                    self.expired[ticket.giver] += 1
                self._left.pop(id(ticket), None)


def lease_of(giver: ProxyInstance) -> float:
    """Seconds for which a prefill server keeps the blocks of a ticket that nobody renews."""
    return giver.info.lease_seconds if giver.info is not None else LEASE_SECONDS
