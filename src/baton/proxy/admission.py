"""How many requests may be under way, and who waits: before prefill, since a wait after it would pin blocks."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.proxy.errors import ProxyError


class Gate:
    """Lets a number of requests through at a time; the rest wait in line, first come, first served.

    A request may take several places. It gets no more than there are in all, so that everyone's turn comes.

    Args:
        most: places; None has no limit. Changed by :meth:`resize`.
        queue: requests that may wait; one more is refused.
        wait_seconds: how long one may wait.

    Attributes:
        active: places that are taken.
    """

    def __init__(self, most: int | None = None, queue: int = 100, wait_seconds: float = 60.0) -> None:
        self.most = most
        self.queue = queue
        self.wait_seconds = wait_seconds
        self.active = 0
        # Who waits, and for how many places.
        self._waiting: deque[tuple[asyncio.Future[int], int]] = deque()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    def try_enter(self) -> bool:
        """Take a place if one is free; every one taken is given back by :meth:`leave`."""
        if self.most is None or (self.active < self.most and not self._waiting):
            self.active += 1
            return True
        return False

    async def enter(self, places: int = 1) -> int:
        """Take so many places, now or when it is this one's turn.

        Returns:
            How many were taken, to be given back.

        Raises:
            ProxyError: 429, the queue is full or the wait was too long; no place was taken.
        """
        if not self._waiting and (taken := self._take(places)):
            return taken
        if len(self._waiting) >= self.queue:
            raise ProxyError(429, "too many requests are under way and in line: try again later", retry_after=1)
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, places))
        try:
            async with asyncio.timeout(self.wait_seconds):
                return await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # The places came in the very moment of giving up.
                self.leave(turn.result())
            if isinstance(error, TimeoutError):
                raise ProxyError(
                    429, f"no place came free within {self.wait_seconds:g} s: try again later", retry_after=1
                ) from error
            raise
        finally:
            if (turn, places) in self._waiting:
                self._waiting.remove((turn, places))
                self._let_in()

    def leave(self, places: int = 1) -> None:
        """Give places back: to the next in line, or to whoever comes."""
        self.active -= places
        if self._waiting:
            self._let_in()

    def resize(self, most: int) -> None:
        """There are so many places from now on; who is in stays in."""
        self.most = most
        self._let_in()

    def _take(self, places: int) -> int:
        """So many places, or all there are when more are wanted; 0 when they are not free."""
        if self.most is not None:
            places = min(places, self.most)
            if self.active + places > self.most:
                return 0
        self.active += places
        return places

    def _let_in(self) -> None:
        while self._waiting:
            turn, places = self._waiting[0]
            if not turn.done():
                taken = self._take(places)
                if not taken:
                    return
                turn.set_result(taken)
            self._waiting.popleft()
