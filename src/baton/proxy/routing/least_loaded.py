"""The instance with the fewest of our own requests on it; equals take turns, so that an idle pool is used evenly."""

from __future__ import annotations

from collections.abc import Sequence

from baton.proxy.fleet import ProxyInstance
from baton.proxy.routing.base import after


class LeastLoaded:
    """By what is in flight, as this proxy counts it: no engine is asked."""

    def __init__(self) -> None:
        self._last = -1

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        least = min(instance.in_flight for instance in usable)
        chosen = after(self._last, [instance for instance in usable if instance.in_flight == least])
        self._last = chosen.place
        return chosen
