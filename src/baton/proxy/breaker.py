"""When an instance, or a pair of them, is given work, by what came of earlier work. Pure: the time is handed in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

_LONG_AGO = float("-inf")

Trial = tuple["Breaker", float]
"""A breaker that is not closed, and when somebody became its trial."""


class BreakerState(enum.IntEnum):
    """The states of a circuit breaker; the numbers are those of the metric."""

    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2

    @property
    def word(self) -> str:
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True)
class BreakerRules:
    """When a breaker opens and closes.

    Attributes:
        failures: in a row, with no success between them, that open it.
        successes: of trials in a row that close it again.
        open_seconds: until the first trial; also how long a trial is waited for before the next.
        window_seconds: a row of failures must lie within; an older one begins anew.
        enabled: False never opens it.
    """

    failures: int = 5
    successes: int = 2
    open_seconds: float = 5.0
    window_seconds: float = 30.0
    enabled: bool = True


class Breaker:
    """Closed while all is well; open after failures in a row; then half-open, which lets in one trial at a time.

    All methods take the time, in seconds on a monotonic clock.

    Attributes:
        failures: in a row so far; while there are none, a success changes nothing.
        since: when it came into its state.
        why: what opened it last, in words.
    """

    __slots__ = ("_before", "_first_at", "_rules", "_state", "_successes", "_trial_at", "failures", "since", "why")

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._state = BreakerState.CLOSED
        self._successes = 0
        self._first_at = 0.0
        self._trial_at = _LONG_AGO
        self._before: tuple[BreakerState, int, float, float] | None = None
        self.failures = 0
        self.since = 0.0
        self.why = ""

    def state(self, now: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now - self.since >= self._rules.open_seconds:
            self._enter(BreakerState.HALF_OPEN, now)
        return self._state

    def closed(self) -> bool:
        return self._state is BreakerState.CLOSED

    def may_try(self, now: float) -> bool:
        """Whether it is half-open and no trial is under way."""
        return self.state(now) is BreakerState.HALF_OPEN and now - self._trial_at >= self._rules.open_seconds

    def try_now(self, now: float) -> None:
        """A trial is sent. One whose end is never told is waited for as long as the breaker was open."""
        self._trial_at = now

    def give_up(self, since: float) -> None:
        """The trial of that time was not made: another may be. Nothing when it has ended."""
        if self._trial_at == since:
            self._trial_at = _LONG_AGO

    def success(self, now: float) -> None:
        """Something ended well."""
        match self.state(now):
            case BreakerState.CLOSED:
                self.failures, self._before = 0, None
            case BreakerState.HALF_OPEN:
                self._trial_at = _LONG_AGO
                self._successes += 1
                if self._successes >= self._rules.successes:
                    self._enter(BreakerState.CLOSED, now)

    def failure(self, now: float, why: str) -> bool:
        """Something failed; whether that opened it."""
        if not self._rules.enabled:
            return False
        match self.state(now):
            case BreakerState.OPEN:
                # Sent before it opened: known already.
                return False
            case BreakerState.HALF_OPEN:
                self.trip(now, why)
                return True
        self._before = (self._state, self.failures, self._first_at, self.since)
        if not self.failures or now - self._first_at > self._rules.window_seconds:
            self.failures, self._first_at = 0, now
        self.failures += 1
        if self.failures < self._rules.failures:
            return False
        self._enter(BreakerState.OPEN, now)
        self.why = why
        return True

    def neither(self) -> None:
        """Something ended in a way that says nothing of who did it: a trial is over without an outcome."""
        self._trial_at = _LONG_AGO

    def forgive(self) -> bool:
        """The last failure was somebody else's: as if it had not been counted; whether that closed it."""
        if self._before is None:
            return False
        opened = not self.closed()
        self._state, self.failures, self._first_at, self.since = self._before
        self._before = None
        return opened

    def trip(self, now: float, why: str) -> None:
        """Open it, whatever was counted."""
        if self._rules.enabled:
            self._enter(BreakerState.OPEN, now)
            self.failures = max(self.failures, 1)
            self._before = None
            self.why = why

    def reset(self, now: float) -> None:
        """Forget everything: another engine is there now."""
        self._enter(BreakerState.CLOSED, now)

    def _enter(self, state: BreakerState, now: float) -> None:
        # A breaker that is half-open is so since its time was over, not since somebody looked.
        self.since = self.since + self._rules.open_seconds if state is BreakerState.HALF_OPEN else now
        self._state = state
        self._successes = 0
        self._trial_at = _LONG_AGO
        if state is BreakerState.CLOSED:
            self.failures, self._before, self.why = 0, None, ""


@dataclass(frozen=True)
class ProbeRules:
    """How an instance is asked for its health.

    Attributes:
        interval_seconds: from one probe's end to the next.
        timeout_seconds: for one.
        failures: in a row that take it out; a refused connection does at once, since nobody is there.
        successes: in a row that take it in again.
        path: what is asked for.
    """

    interval_seconds: float = 1.0
    timeout_seconds: float = 2.0
    failures: int = 2
    successes: int = 1
    path: bytes = b"/health"


USUAL_BREAKER = BreakerRules()
USUAL_PROBES = ProbeRules()


class Vitals:
    """Whether an instance lives, by its probes."""

    __slots__ = ("_bad", "_good", "_rules", "_seen")

    def __init__(self, rules: ProbeRules) -> None:
        self._rules = rules
        self._good = 0
        self._bad = 0
        self._seen = False

    def good(self, alive: bool) -> bool:
        """A probe was good: whether the instance, that was taken for *alive* or not, is alive."""
        self._good, self._bad = self._good + 1, 0
        # One that was never up has nothing to be forgiven.
        first, self._seen = not self._seen, True
        return alive or first or self._good >= self._rules.successes

    def bad(self, alive: bool, certain: bool = False) -> bool:
        """A probe was bad, or with *certain* nobody is there: the same."""
        self._good, self._bad = 0, self._bad + 1
        return alive and not certain and self._bad < self._rules.failures
