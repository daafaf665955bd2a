"""What came of hand-offs, pair by pair, and whose fault it is when they fail. Pure: the clock's time is handed in.

A prefill server whose tickets fail wherever they go answers its own legs well, and the decode servers that get them
look broken. So hand-offs are counted by pair: the one that all failing pairs share, and no working one, is to blame.
Nothing is noted while all is well: a hand-off that works costs a look at an empty table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from baton.proxy.breaker import Breaker, BreakerRules, Trial

MOST_FAILURES = 3
"""A pair is one of many ways, and is given up sooner than an instance."""

Pair = tuple[str, str]
"""Ids of a prefill and a decode server."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed hand-off says.

    Attributes:
        guilty: the id of the instance that is to be taken out; None when that is not known.
        spared: whether the decode server is known to be good otherwise: the failure is not to be counted against it.
    """

    guilty: str | None = None
    spared: bool = False


class Pairs:
    """The record of all pairs that have failed since they last worked.

    Attributes:
        bad: those that are not known to be good; empty while all is well.
        failed: failures of each pair so far.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = replace(rules, failures=min(rules.failures, MOST_FAILURES), successes=1)
        self.bad: dict[Pair, Breaker] = {}
        # Noted only while some pair is bad.
        self._worked_at: dict[Pair, float] = {}
        self.failed: dict[Pair, int] = {}

    def may(self, prefill: str, decode: str, now: float) -> bool:
        """Whether the two may hand over; an open pair is tried by one request when its time is over."""
        breaker = self.bad.get((prefill, decode))
        return breaker is None or breaker.closed() or breaker.may_try(now)

    def chosen(self, prefill: str, decode: str, now: float) -> list[Trial]:
        """A request goes to the two: while they are not known to be good, it is the one that tries them."""
        breaker = self.bad.get((prefill, decode))
        if breaker is None or breaker.closed():
            return []
        breaker.try_now(now)
        return [(breaker, now)]

    def worked(self, prefill: str, decode: str, now: float) -> None:
        pair = (prefill, decode)
        self._worked_at[pair] = now
        breaker = self.bad.get(pair)
        if breaker is not None:
            breaker.success(now)
            if breaker.closed():
                del self.bad[pair]
        if not self.bad:
            self._worked_at.clear()

    def fail(self, prefill: str, decode: str, now: float, why: str) -> Verdict:
        """A hand-off failed.

        Args:
            why: in words.
        """
        pair = (prefill, decode)
        self.failed[pair] = self.failed.get(pair, 0) + 1
        breaker = self.bad.setdefault(pair, Breaker(self._rules))
        breaker.failure(now, why)
        self._worked_at.pop(pair, None)
        prefill_works, decode_works = self._works(prefill, 0, now), self._works(decode, 1, now)
        of_prefill = [each.failures for pair, each in self.bad.items() if pair[0] == prefill]
        of_decode = [each.failures for pair, each in self.bad.items() if pair[1] == decode]
        blames_prefill = not prefill_works and self._says_enough(of_prefill, decode_works)
        blames_decode = not decode_works and self._says_enough(of_decode, prefill_works)
        guilty = None
        if blames_prefill and not (blames_decode and len(of_decode) > len(of_prefill)):
            guilty = prefill
        elif blames_decode:
            guilty = decode
        return Verdict(guilty, spared=decode_works or guilty == prefill)

    def forget(self, instance: str) -> None:
        """Another engine is there now, or none any more."""
        for table in (self.bad, self._worked_at):
            for pair in [each for each in table if instance in each]:
                del table[pair]

    def drop(self, instance: str) -> None:
        """It is no instance any more."""
        self.forget(instance)
        for pair in [each for each in self.failed if instance in each]:
            del self.failed[pair]

    def _says_enough(self, failures: Sequence[int], other_works: bool) -> bool:
        """Whether failures in a row, of each pair of an instance that works with nobody, say that it is its fault.

        Args:
            other_works: the other half of the pair works with others. Where that is not known, several must have failed
                often: those that work have shown it by then.
        """
        enough = self._rules.failures
        return (other_works and sum(failures) >= enough) or sum(each >= enough for each in failures) > 1

    def _works(self, instance: str, side: int, now: float) -> bool:
        """Whether it has handed over with somebody lately."""
        oldest = now - self._rules.window_seconds
        return any(pair[side] == instance and at >= oldest for pair, at in self._worked_at.items())
