"""How many requests begin in one turn of the event loop: a burst of them is taken in parts.

Two thousand that come at once would otherwise all be worked on before anything else is looked at: a probe, an answer
that is there already, a client that has left. What asks for little is not held up at all.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 64
"""About ten milliseconds of a proxy's work."""

LIGHT = frozenset({"GET", "HEAD"})
"""Methods of requests that are answered from what is known."""


class Pace:
    """Of one server; requests begin in the order in which they came."""

    __slots__ = ("_begun", "_line", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._begun = 0
        self._line: deque[asyncio.Future[None]] = deque()

    def begins(self) -> bool:
        """Whether one more may begin at once; who may not waits for :meth:`turn`."""
        begun = self._begun = self._begun + 1
        if begun == 1:
            self._loop.call_soon(self._next)
        return begun <= AT_ONCE

    async def turn(self) -> None:
        """Wait in line."""
        place = self._loop.create_future()
        self._line.append(place)
        await place

    def _next(self) -> None:
        line, count = self._line, 0
        while line and count < AT_ONCE:
            place = line.popleft()
            # Who has left is not waited for.
            if not place.done():
                place.set_result(None)
                count += 1
        self._begun = count
        if count:
            self._loop.call_soon(self._next)
