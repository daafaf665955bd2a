"""What vLLM's push writer thread waits on and asks (0.32, nixl/push_worker.py), so that nobody polls for nothing.

The writer sleeps on an event until the worker's main thread sets it, and hands the main thread notices in a queue.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sized

from baton.engine.push_notices import Said, read
from baton.engine.waiting import Ringer

POLL_SECONDS = 0.05
"""How often a worker that has nothing in flight looks for notifications: nobody wakes it for a cancellation."""

AWAITING_POLL_SECONDS = 0.002
AWAITING_SHARE = 0.01
"""How often one looks that waits for a push: after two milliseconds, or a hundredth of the wait so far."""

HEARTBEAT = b"HB:"
"""How vLLM's notices begin that only renew leases (nixl/base_worker.py, ``_send_heartbeats``): no hurry."""


class Polling(threading.Event):
    """An event whose waiter looks again by itself, often while *awaited* is not empty."""

    def __init__(self, awaited: Sized) -> None:
        super().__init__()
        self._awaited = awaited
        self._since = 0.0

    def set(self) -> None:
        self._since = time.monotonic()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            waited = AWAITING_SHARE * (time.monotonic() - self._since) if len(self._awaited) else POLL_SECONDS
            timeout = min(max(waited, AWAITING_POLL_SECONDS), POLL_SECONDS)
        return super().wait(timeout)


class Ringing(queue.Queue[bytes]):
    """Notices for the worker's main thread, which nobody but the engine core's steps makes run: they are rung for.

    Attributes:
        said: our own among them, which vLLM would not understand.
    """

    def __init__(self, ringer: Ringer) -> None:
        super().__init__()
        self._ringer = ringer
        self.said: queue.SimpleQueue[Said] = queue.SimpleQueue()

    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        said = read(item)
        if said is None:
            super().put(item, block, timeout)
        else:
            self.said.put(said)
        if not item.startswith(HEARTBEAT):
            self._ringer.ring()


class Pulse(threading.Event):
    """What vLLM's writer asks in each round whether to stop; knows from it whether the process stood still."""

    def __init__(self, stall_seconds: float) -> None:
        super().__init__()
        self._stall_seconds = stall_seconds
        self._asked_at = time.monotonic()
        self._stood_still = False
        self.round = 0
        """Of the writer's loop, which asks at its start."""

    def is_set(self) -> bool:
        self._look()
        self.round += 1
        return super().is_set()

    def _look(self) -> None:
        now = time.monotonic()
        self._stood_still |= now - self._asked_at > self._stall_seconds
        self._asked_at = now

    def stood_still(self) -> bool:
        """Whether it did since the last time this was asked."""
        self._look()
        stood_still, self._stood_still = self._stood_still, False
        return stood_still
