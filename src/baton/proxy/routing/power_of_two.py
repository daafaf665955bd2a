"""The less loaded of two drawn at random: nearly as even as the least loaded, and several proxies don't run in step."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.proxy.fleet import ProxyInstance


class PowerOfTwo:
    """By what is in flight, as this proxy counts it; of equals the one drawn first."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        if len(usable) == 1:
            return usable[0]
        one, other = self._random.sample(usable, 2)
        return other if other.in_flight < one.in_flight else one
