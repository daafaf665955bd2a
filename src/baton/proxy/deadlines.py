"""The whole time that a request may take, for all requests of a proxy on one timer: one each would cost more."""

from __future__ import annotations

import asyncio
import time


class Deadline:
    """Of one request, whose *task* is cancelled at *at*, on the monotonic clock.

    Attributes:
        over: whether it was.
    """

    __slots__ = ("at", "over", "task")

    def __init__(self, task: asyncio.Task[object], at: float) -> None:
        self.task = task
        self.at = at
        self.over = False


class Deadlines:
    """All of *seconds* from a request's arrival, so that they come in the order in which they were set."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, arrived: float) -> Deadline:
        """The deadline of the request that the running task answers; to be stopped."""
        task = asyncio.current_task()
        assert task is not None
        deadline = Deadline(task, arrived + self.seconds)
        self._open[deadline] = None
        if self._timer is None:
            self._set(deadline.at)
        return deadline

    def stop(self, deadline: Deadline) -> None:
        self._open.pop(deadline, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, at: float) -> None:
        seconds = max(at - time.monotonic(), 0.0)
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        """Cancel what is overdue, and set the timer for the next."""
        self._timer = None
        now = time.monotonic()
        for deadline in list(self._open):
            if deadline.at > now:
                self._set(deadline.at)
                return
            del self._open[deadline]
            deadline.over = True
            deadline.task.cancel()
