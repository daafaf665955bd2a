"""How many requests may be under way, and who waits: before prefill, since a wait after it would pin blocks."""

from __future__ import annotations

import asyncio
from collections import deque

from baton.proxy.errors import ProxyError


class Gate:
    """Lets a number of requests through at a time; the rest wait in line, first come, first served.

    Args:
        most: requests under way at most; None has no limit.
        queue: requests that may wait; one more is refused.
        wait_seconds: how long one may wait.
    """

    def __init__(self, most: int | None = None, queue: int = 100, wait_seconds: float = 60.0) -> None:
        self.most = most
        self.queue = queue
        self.wait_seconds = wait_seconds
        self.active = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._waiting)

    def try_enter(self) -> bool:
        """Take a place if one is free; every one taken is given back by :meth:`leave`."""
        if self.most is None or self.active < self.most:
            self.active += 1
            return True
        return False

    async def enter(self) -> None:
        """Take a place, now or when it is this one's turn.

        Raises:
            ProxyError: 429, the queue is full or the wait was too long; no place was taken.
        """
        if self.try_enter():
            return
        if len(self._waiting) >= self.queue:
            raise ProxyError(429, "too many requests are under way and in line: try again later", retry_after=1)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self.wait_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                # The place came in the very moment of giving up.
                self.leave()
            if isinstance(error, TimeoutError):
                raise ProxyError(
                    429, f"no place came free within {self.wait_seconds:g} s: try again later", retry_after=1
                ) from error
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def leave(self) -> None:
        """Give a place back: to the next in line, or to whoever comes."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.active -= 1
