"""One after the other; an instance that is out is passed over and does not shift the turn of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from baton.proxy.fleet import ProxyInstance
from baton.proxy.routing.base import after


class RoundRobin:
    """Each instance in turn, by its place in the fleet."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        chosen = after(self._last, usable)
        self._last = chosen.place
        return chosen
