"""Comments in a silent stream: gateways cut connections on which nothing moves, and a long prefill is silent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from baton.http import Header, Responder

logger = logging.getLogger("baton.proxy")

COMMENT = b": keep-alive\n\n"
_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class Moving(Protocol):
    """Something that passes events on.

    Attributes:
        last_at: when it did so last, on the monotonic clock.
    """

    last_at: float


class Beats:
    """The beats of all streams of one proxy, on one timer: one for each stream would cost more than its events.

    Args:
        seconds: of silence, after which a stream gets its comment: at the latest a quarter, or a second, later.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._period = min(1.0, seconds / 4)
        self._beats: set[Beat] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, responder: Responder, head: Callable[[list[Header]], list[Header]]) -> Beat:
        """One for the stream that *responder* sends, whose answer's headers *head* makes; to be stopped."""
        beat = Beat(responder, head, self._beats.discard)
        self._beats.add(beat)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._period, self._tick)
        return beat

    def _tick(self) -> None:
        now = time.monotonic()
        for beat in list(self._beats):
            try:
                beat.tick(now, self._seconds)
            except Exception:
                # The others' go on.
                logger.exception("a comment could not be written")
                beat.stop()
        self._timer = asyncio.get_running_loop().call_later(self._period, self._tick) if self._beats else None


class Beat:
    """Writes a comment after some silence, between two events.

    The first one sends the client's head, with status 200, before any engine has answered: an error that comes
    later is an event of the stream.

    Attributes:
        source: what passes the events on, once there is something.
    """

    __slots__ = ("_head", "_last", "_leave", "_responder", "source")

    def __init__(
        self,
        responder: Responder,
        head: Callable[[list[Header]], list[Header]],
        leave: Callable[[Beat], None],
    ) -> None:
        self._responder = responder
        self._head = head
        self._leave = leave
        self._last = time.monotonic()
        self.source: Moving | None = None

    def tick(self, now: float, seconds: float) -> None:
        """Write the comment when *seconds* before *now* were silent."""
        last = self._last if self.source is None else max(self._last, self.source.last_at)
        if now - last < seconds or self._responder.ended or self._responder.paused:
            return
        if not self._responder.started:
            self._responder.start(200, self._head([_STREAM]))
        self._responder.write(COMMENT)
        self._last = now

    def stop(self) -> None:
        self._leave(self)
