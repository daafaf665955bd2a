"""Whether and when a request is tried again: decisions, without I/O."""

from __future__ import annotations

import math

import pytest

from baton.cluster import Role
from baton.proxy.attempts import Attempts, Cause, Failure, Retries, cause_of_status

P = Role.PREFILL


def again(
    attempts: Attempts,
    cause: Cause,
    *,
    others: bool = False,
    left: float = math.inf,
    retries: Retries = Retries(),  # noqa: B008 - frozen
) -> float | None:
    return attempts.again(retries, Failure(P, cause), others=others, left=left, chance=0.5)


@pytest.mark.parametrize("cause", list(Cause))
def test_another_instance_is_asked_at_once_whatever_failed(cause: Cause) -> None:
    attempts = Attempts()
    assert again(attempts, cause, others=True) == 0.0
    assert (attempts.made, attempts.waits) == (1, 0)


@pytest.mark.parametrize(
    ("cause", "wait"),
    [
        (Cause.CONNECT, 0.05),
        (Cause.UNAVAILABLE, 0.05),
        (Cause.STALE, 0.05),
        (Cause.NO_INSTANCE, 0.05),
        (Cause.BROKE, None),
        (Cause.TOO_SLOW, None),
        (Cause.SERVER_ERROR, None),
    ],
)
def test_the_same_instance_is_asked_again_after_a_wait_and_only_when_it_did_no_work(
    cause: Cause, wait: float | None
) -> None:
    assert again(Attempts(), cause) == wait


def test_waits_grow_up_to_a_limit_and_count_only_themselves() -> None:
    retries = Retries(most=9, initial_seconds=0.1, max_seconds=0.5, multiplier=2.0, jitter=0.0)
    attempts = Attempts()
    waits = [again(attempts, Cause.CONNECT, retries=retries) for _ in range(2)]
    waits.append(again(attempts, Cause.CONNECT, others=True, retries=retries))
    waits += [again(attempts, Cause.CONNECT, retries=retries) for _ in range(3)]
    assert waits == [0.1, 0.2, 0.0, 0.4, 0.5, 0.5]


@pytest.mark.parametrize(("chance", "wait"), [(0.0, 0.8), (0.5, 1.0), (1.0, 1.2)])
def test_a_wait_is_longer_or_shorter_at_random(chance: float, wait: float) -> None:
    retries = Retries(initial_seconds=1.0, max_seconds=1.0, jitter=0.2)
    assert retries.wait(0, chance) == pytest.approx(wait)


def test_a_wait_is_never_negative_and_never_overflows() -> None:
    assert Retries(jitter=1.0).wait(0, 0.0) == 0.0
    assert Retries(max_seconds=1.0, jitter=0.0).wait(1000, 0.5) == 1.0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_attempts_are_bounded(most: int) -> None:
    attempts = Attempts()
    made = [again(attempts, Cause.BROKE, others=True, retries=Retries(most=most)) for _ in range(5)]
    assert made == [0.0] * most + [None] * (5 - most)


def test_nothing_is_tried_beyond_the_requests_whole_time() -> None:
    assert again(Attempts(), Cause.BROKE, others=True, left=0.0) is None
    assert again(Attempts(), Cause.BROKE, others=True, left=0.01) == 0.0
    # the wait would outlast it
    assert again(Attempts(), Cause.CONNECT, left=0.05) is None
    assert again(Attempts(), Cause.CONNECT, left=0.06) == 0.05


@pytest.mark.parametrize(
    ("status", "cause"),
    [
        (400, None),
        (404, None),
        (429, None),
        (499, None),
        (500, Cause.SERVER_ERROR),
        (502, Cause.SERVER_ERROR),
        (503, Cause.UNAVAILABLE),
    ],
)
def test_a_clients_own_mistake_is_no_cause(status: int, cause: Cause | None) -> None:
    assert cause_of_status(status) is cause
