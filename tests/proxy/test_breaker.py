"""The state machine of a breaker and of probes, on a clock of numbers."""

from __future__ import annotations

import pytest

from baton.http import Broken, ConnectFailed, OutOfDescriptors, TooSlow
from baton.proxy.breaker import Breaker, BreakerRules, BreakerState, ProbeRules, Vitals
from baton.proxy.errors import ProxyError, StreamFailed
from baton.proxy.upstream import Outcome, outcome

RULES = BreakerRules(failures=3, successes=2, open_seconds=5.0, window_seconds=30.0)
CLOSED, OPEN, HALF_OPEN = BreakerState


def opened(at: float = 0.0, rules: BreakerRules = RULES) -> Breaker:
    breaker = Breaker(rules)
    for _ in range(rules.failures):
        breaker.failure(at, "500")
    assert breaker.state(at) is OPEN
    return breaker


def test_failures_in_a_row_open_it_and_the_last_is_the_one_that_says_so() -> None:
    breaker = Breaker(RULES)
    assert [breaker.failure(each, "500") for each in (0.0, 1.0, 2.0)] == [False, False, True]
    assert breaker.state(2.0) is OPEN
    assert breaker.why == "500"


def test_a_success_begins_the_row_anew() -> None:
    breaker = Breaker(RULES)
    for now in range(100):
        breaker.failure(float(now), "500")
        breaker.failure(float(now), "500")
        breaker.success(float(now))
    assert breaker.state(100.0) is CLOSED
    assert not breaker.failures


def test_failures_further_apart_than_the_window_are_no_row() -> None:
    breaker = Breaker(RULES)
    assert not any(breaker.failure(31.0 * each, "500") for each in range(10))
    assert breaker.state(400.0) is CLOSED


def test_it_is_half_open_when_its_time_is_over_and_lets_one_trial_in() -> None:
    breaker = opened()
    assert not breaker.may_try(4.9)
    assert breaker.may_try(5.0)
    assert breaker.state(5.0) is HALF_OPEN
    breaker.try_now(5.0)
    assert not breaker.may_try(5.1)


def test_a_good_trial_lets_the_next_in_and_enough_of_them_close_it() -> None:
    breaker = opened()
    assert breaker.may_try(5.0)
    breaker.try_now(5.0)
    breaker.success(5.5)
    assert breaker.state(5.5) is HALF_OPEN
    assert breaker.may_try(5.5)
    breaker.success(6.0)
    assert breaker.state(6.0) is CLOSED
    assert not breaker.failures


def test_a_bad_trial_opens_it_for_as_long_again() -> None:
    breaker = opened()
    assert breaker.may_try(5.0)
    assert breaker.failure(6.0, "again")
    assert breaker.state(10.9) is OPEN
    assert breaker.state(11.0) is HALF_OPEN
    assert breaker.why == "again"


def test_a_trial_whose_end_is_never_told_does_not_keep_the_next_out_for_ever() -> None:
    breaker = opened()
    assert breaker.may_try(5.0)
    breaker.try_now(5.0)
    assert not breaker.may_try(9.9)
    assert breaker.may_try(10.0)


def test_a_trial_that_says_nothing_makes_room_for_another() -> None:
    breaker = opened()
    assert breaker.may_try(5.0)
    breaker.try_now(5.0)
    breaker.neither()
    assert breaker.may_try(5.1)
    assert breaker.state(5.1) is HALF_OPEN


def test_what_was_sent_before_it_opened_changes_nothing() -> None:
    breaker = opened(1.0)
    breaker.success(2.0)
    assert not breaker.failure(3.0, "late")
    assert breaker.state(3.0) is OPEN
    assert breaker.state(6.0) is HALF_OPEN


def test_a_failure_that_is_forgiven_was_never_counted() -> None:
    breaker = Breaker(RULES)
    breaker.failure(0.0, "500")
    breaker.failure(1.0, "500")
    assert breaker.failure(2.0, "500")
    assert breaker.forgive()
    assert breaker.state(2.0) is CLOSED
    assert breaker.failures == 2
    assert not breaker.forgive()


def test_one_that_is_switched_off_never_opens() -> None:
    breaker = Breaker(BreakerRules(failures=1, enabled=False))
    assert not any(breaker.failure(0.0, "500") for _ in range(100))
    breaker.trip(0.0, "blamed")
    assert breaker.state(0.0) is CLOSED


def test_another_engine_has_a_clean_record() -> None:
    breaker = opened()
    breaker.reset(1.0)
    assert breaker.state(1.0) is CLOSED
    assert not breaker.failures


PROBES = ProbeRules(failures=3, successes=2)


def test_bad_probes_in_a_row_take_it_out() -> None:
    vitals = Vitals(PROBES)
    assert vitals.good(alive=False)
    assert [vitals.bad(alive=True) for _ in range(3)] == [True, True, False]


def test_a_good_probe_between_bad_ones_keeps_it_in() -> None:
    vitals = Vitals(PROBES)
    for _ in range(10):
        assert vitals.bad(alive=True)
        assert vitals.bad(alive=True)
        assert vitals.good(alive=True)


def test_where_nobody_is_there_one_probe_is_enough() -> None:
    assert not Vitals(PROBES).bad(alive=True, certain=True)


def test_one_that_was_up_needs_as_many_good_probes_as_are_asked_for_and_a_new_one_needs_one() -> None:
    vitals = Vitals(PROBES)
    assert vitals.good(alive=False)
    assert not vitals.bad(alive=True, certain=True)
    assert [vitals.good(alive=False) for _ in range(2)] == [False, True]


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (200, None, Outcome.GOOD),
        (500, None, Outcome.BAD),
        (500, RuntimeError("an engine's refusal"), Outcome.BAD),
        (503, None, Outcome.BAD),
        (501, None, Outcome.NEITHER),
        *((status, None, Outcome.NEITHER) for status in (400, 401, 404, 408, 413, 422, 429, 499)),
        (0, ConnectFailed("refused"), Outcome.BAD),
        (0, Broken("closed", began=False, reused=False), Outcome.BAD),
        (0, TooSlow("late"), Outcome.BAD),
        (200, Broken("cut", began=True, reused=False), Outcome.BAD),
        (200, StreamFailed(b"{}"), Outcome.BAD),
        (200, ProxyError(502, "a failed generation"), Outcome.BAD),
        (200, ProxyError(429, "ours"), Outcome.NEITHER),
        (0, OutOfDescriptors("ours"), Outcome.NEITHER),
        (200, KeyboardInterrupt(), Outcome.NEITHER),
    ],
)
def test_what_the_end_of_a_leg_says_of_its_engine(status: int, error: BaseException | None, says: Outcome) -> None:
    assert outcome(status, error) is says
