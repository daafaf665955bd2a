"""Any instance, whatever is on it: needs no state, and is even over many requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from baton.proxy.fleet import ProxyInstance


class RandomChoice:
    """Each instance with the same chance."""

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311

    def pick(self, usable: Sequence[ProxyInstance]) -> ProxyInstance:
        return self._random.choice(usable)
