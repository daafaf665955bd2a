"""Comments in a silent stream: gateways cut connections on which nothing moves, and a long prefill is silent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from baton.http import Header, Responder

COMMENT = b": keep-alive\n\n"
_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")


class Moving(Protocol):
    """Something that passes events on.

    Attributes:
        last_at: when it did so last, on the monotonic clock.
    """

    last_at: float


class Beat:
    """Writes a comment after each *seconds* of silence, between two events.

    The first one sends the client's head, with status 200, before any engine has answered: an error that comes
    later is an event of the stream.

    Args:
        responder: of the client.
        head: makes the headers of the answer.
        seconds: of silence.

    Attributes:
        source: what passes the events on, once there is something.
    """

    def __init__(self, responder: Responder, head: Callable[[list[Header]], list[Header]], seconds: float) -> None:
        self._responder = responder
        self._head = head
        self._seconds = seconds
        self._last = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds, self._tick)
        self.source: Moving | None = None

    def _tick(self) -> None:
        if self._responder.ended:
            return
        now = time.monotonic()
        quiet = now - max(self._last, self.source.last_at if self.source is not None else 0.0)
        if quiet >= self._seconds and not self._responder.paused:
            if not self._responder.started:
                self._responder.start(200, self._head([_STREAM]))
            self._responder.write(COMMENT)
            self._last, quiet = now, 0.0
        self._timer = self._loop.call_later(max(self._seconds - quiet, 0.001), self._tick)

    def stop(self) -> None:
        self._timer.cancel()
