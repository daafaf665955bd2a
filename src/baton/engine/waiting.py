"""How long an engine that only waits may sleep between two looks.

vLLM's engine loop spins while a request waits for a KV cache or a kept block for its reader: a core burnt, which on a
shared machine is taken from the very server that is waited for.
"""

from __future__ import annotations

SHORTEST_SECONDS = 0.0005
LONGEST_SECONDS = 0.025
SHARE = 0.05
"""Of the time waited so far: what a nap may add to it."""


class Naps:
    """Naps that grow with the wait: they add a twentieth to it, and at most 25 ms."""

    def __init__(self) -> None:
        self._since: float | None = None

    def busy(self) -> None:
        """Something was done: the next wait begins anew."""
        self._since = None

    def seconds(self, now: float) -> float:
        """How long to sleep at *now*, in seconds, since there is nothing to do."""
        if self._since is None:
            self._since = now
        return min(max((now - self._since) * SHARE, SHORTEST_SECONDS), LONGEST_SECONDS)
