"""The interface of a policy, and what every pool has around its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.proxy.fleet import ProxyInstance


class Policy(Protocol):
    """Chooses instances of one role. Each pool has a policy object of its own."""

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        """One of *usable*, which holds at least one instance, in the fleet's order."""


class Picker:
    """A policy, and the note that the request for which it chose an instance that is half-open is its trial."""

    __slots__ = ("_pick",)

    def __init__(self, policy: Policy) -> None:
        self._pick = policy.pick

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        chosen = self._pick(usable)
        if not chosen.usable:
            chosen.try_now()
        return chosen


def after(last: int, among: Sequence[ProxyInstance]) -> ProxyInstance:
    """The next in the circle after place *last*."""
    for instance in among:
        if instance.place > last:
            return instance
    return among[0]
