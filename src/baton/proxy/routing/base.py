"""The interface of a policy, and what policies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.proxy.fleet import ProxyInstance


class Policy(Protocol):
    """Chooses instances of one role. Each pool has a policy object of its own."""

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        """One of *usable*, which holds at least one instance, in the fleet's order."""


def after(last: int, among: Sequence[ProxyInstance]) -> ProxyInstance:
    """The next in the circle after place *last*."""
    for instance in among:
        if instance.place > last:
            return instance
    return among[0]
