"""Whether a request that an engine failed is tried again, and when: decisions on plain values, no I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from baton.cluster import Role


class Cause(enum.StrEnum):
    """Why an attempt failed."""

    CONNECT = "connect"
    """No connection: nothing was sent."""
    BROKE = "broke"
    TOO_SLOW = "too_slow"
    UNAVAILABLE = "unavailable"
    """It answered 503."""
    SERVER_ERROR = "server_error"
    """It answered another 5xx, or that generation failed."""
    STALE = "stale"
    """The ticket was too near the end of its lease to be sent."""
    NO_INSTANCE = "no_instance"
    """None was usable when it was tried again."""


SAME_AGAIN = frozenset((Cause.CONNECT, Cause.UNAVAILABLE, Cause.STALE, Cause.NO_INSTANCE))
"""What may pass by itself, and did no work: the same instance may be asked again when there is no other."""

OF_THE_TRANSFER = frozenset((Cause.BROKE, Cause.UNAVAILABLE, Cause.SERVER_ERROR))
"""What a decode server says, or dies of, when it is the hand-over that fails: either end may be to blame."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What ended an attempt.

    Attributes:
        phase: whose leg it was.
    """

    phase: Role
    cause: Cause


@dataclass(frozen=True)
class Retries:
    """How often a request is tried again, and how long it waits before the same instance is asked again.

    Attributes:
        most: after the first attempt; 0 never tries again.
        initial_seconds, max_seconds, multiplier: the wait, which grows from one to the next.
        jitter: by which part of itself a wait is longer or shorter, at random.
    """

    most: int = 3
    initial_seconds: float = 0.05
    max_seconds: float = 1.0
    multiplier: float = 2.0
    jitter: float = 0.2

    def wait(self, number: int, chance: float) -> float:
        """Seconds to wait, the *number*-th time (from 0).

        Args:
            chance: from 0 to 1, at random.
        """
        # Beyond some number it is the limit in any case; a float would overflow.
        whole = min(self.initial_seconds * self.multiplier ** min(number, 64), self.max_seconds)
        return max(whole * (1 + self.jitter * (2 * chance - 1)), 0.0)


@dataclass(slots=True)
class Attempts:
    """What was tried of one request.

    Attributes:
        made: attempts after the first.
        waits: how many of them had to wait.
        failed: ids of instances that failed it, or that may be why another did.
    """

    made: int = 0
    waits: int = 0
    failed: set[str] = field(default_factory=set)

    def again(self, retries: Retries, failure: Failure, *, others: bool, left: float, chance: float) -> float | None:
        """How many seconds to wait before the next attempt, which is counted; None when there is none.

        Another instance is asked at once. The same one is asked again after a wait, and only when there is no other
        and it may help.

        Args:
            others: whether an instance of the failed role is usable that has not failed this request.
            left: seconds until the request's whole time is over.
            chance: from 0 to 1, at random.
        """
        if self.made >= retries.most or left <= 0:
            return None
        seconds = 0.0
        if not others:
            if failure.cause not in SAME_AGAIN:
                return None
            seconds = retries.wait(self.waits, chance)
            if seconds >= left:
                return None
            self.waits += 1
        self.made += 1
        return seconds


def cause_of_status(status: int) -> Cause | None:
    """What an engine's status says; None for the client's own mistake, which every engine would refuse."""
    if status < 500:
        return None
    return Cause.UNAVAILABLE if status == 503 else Cause.SERVER_ERROR
