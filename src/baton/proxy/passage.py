"""A decode server's stream on its way to the client: callbacks only, no task switch an event."""

from __future__ import annotations

import time
from typing import Protocol

from baton.http import EventBuffer, last_of
from baton.proxy.answers import Correction
from baton.proxy.errors import ProxyError, StreamFailed
from baton.proxy.legs import Rules
from baton.proxy.metrics import Metrics

_DONE = b"[DONE]\n\n"


class Write(Protocol):
    """:meth:`baton.http.Responder.write`."""

    def __call__(self, data: bytes, /, *, last: bool) -> None: ...


class Passage:
    """Passes whole events on as they come, put right where they must be, and watches how the stream ends.

    Args:
        write: takes the bytes for the client, and whether they are likely to be the last; may be replaced.
        correction: what must be put right.
        rules: of the endpoint.
        metrics: where the time between events is counted.

    Attributes:
        first_at: when the first event passed, on the monotonic clock; 0 before it.
        failed: the error that the stream said, in JSON; what comes after it is dropped.
    """

    __slots__ = ("_buffer", "_correction", "_last", "_metrics", "_rules", "failed", "first_at", "last_at", "write")

    def __init__(self, write: Write, correction: Correction, rules: Rules, metrics: Metrics) -> None:
        self.write = write
        self._correction = correction
        self._rules = rules
        self._metrics = metrics
        self._buffer = EventBuffer()
        self._last = b""
        self.first_at = 0.0
        self.last_at = 0.0
        self.failed: bytes | None = None

    def take(self, piece: bytes) -> None:
        """One read from the decode server."""
        run = self._buffer.push(piece)
        if not run or self.failed is not None:
            return
        now = time.monotonic()
        if self.first_at:
            self._metrics.inter_token_seconds.observe(now - self.last_at)
        else:
            self.first_at = now
        self.last_at = now
        if self._correction.concerns(run):
            run, self.failed = self._correction.run(run)
            if not run:
                return
        self._last = run
        turn = self._correction.turn
        if turn is not None and turn.given is not None and last_of(run).startswith(self._rules.ends):
            # Before the client sees the end: its next request may be here before the rest of this one is.
            turn.keep()
        self.write(run, last=run.endswith(_DONE))

    def close(self) -> None:
        """The stream has come to its end.

        Raises:
            StreamFailed: it said that it failed.
            ProxyError: 502, it is not whole.
        """
        if self.failed is not None:
            raise StreamFailed(self.failed)
        if self._buffer.rest or not last_of(self._last).startswith(self._rules.ends):
            raise ProxyError(502, "the decode server ended its answer before it was whole", retry=True)
