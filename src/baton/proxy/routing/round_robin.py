"""One after the other; an instance that is out is passed over and does not shift the turn of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from baton.proxy.fleet import ProxyInstance


class RoundRobin:
    """Each instance in turn, by its place in the fleet."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        chosen = usable[0]
        for instance in usable:
            if instance.place > self._last:
                chosen = instance
                break
        self._last = chosen.place
        return chosen
