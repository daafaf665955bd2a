"""Whose fault failed hand-offs are, on a clock of numbers; and what becomes of the guilty one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, product

import pytest

from baton.cluster import Role
from baton.proxy.breaker import BreakerRules
from baton.proxy.fleet import Fleet, InstanceState, ProxyInstance
from baton.proxy.pairs import Pairs
from tests.proxy.test_fleet import fleet


def blamed(prefills: int, decodes: int, broken: set[str], rounds: int = 20) -> list[str]:
    """Who is blamed, in order, when hand-offs go round and those named ``P1``, ``D0`` or ``P0-D1`` fail."""
    pairs, now, found = Pairs(BreakerRules()), 0.0, list[str]()
    for _ in range(rounds):
        for prefill, decode in product(
            [f"P{each}" for each in range(prefills)], [f"D{each}" for each in range(decodes)]
        ):
            now += 0.01
            if {prefill, decode} & set(found) or not pairs.may(prefill, decode, now):
                continue
            if {prefill, decode, f"{prefill}-{decode}"} & broken:
                guilty = pairs.fail(prefill, decode, now, "500").guilty
                if guilty is not None:
                    found.append(guilty)
            else:
                pairs.worked(prefill, decode, now)
    return found


@pytest.mark.parametrize(
    ("size", "broken", "who"),
    [
        ((2, 2), {"P1"}, ["P1"]),
        ((2, 2), {"D1"}, ["D1"]),
        ((2, 1), {"P1"}, ["P1"]),
        ((1, 2), {"D0"}, ["D0"]),
        ((4, 2), {"P1", "P2", "P3"}, ["P1", "P2", "P3"]),
        ((2, 3), {"D0", "D2"}, ["D0", "D2"]),
        ((2, 2), {"P0-D1"}, []),
        ((1, 1), {"P0"}, []),
        ((3, 3), set(), []),
    ],
)
def test_the_one_that_failing_pairs_share_and_no_working_one_is_to_blame(
    size: tuple[int, int], broken: set[str], who: list[str]
) -> None:
    assert sorted(blamed(*size, broken)) == who


def test_a_broken_prefill_and_a_broken_decode_server_are_both_found() -> None:
    assert sorted(blamed(3, 3, {"P1", "D2"})) == ["D2", "P1"]


def test_a_pair_that_fails_alone_is_not_used_for_a_while_and_then_tried_again() -> None:
    pairs = Pairs(BreakerRules(open_seconds=5.0))
    for now in (0.0, 0.1, 0.2):
        pairs.fail("P0", "D1", now, "500")
    assert not pairs.may("P0", "D1", 1.0)
    assert pairs.may("P0", "D0", 1.0)
    assert pairs.may("P0", "D1", 5.2)
    pairs.worked("P0", "D1", 5.3)
    assert not pairs.bad
    assert pairs.may("P0", "D1", 5.3)


def test_nothing_is_kept_of_pairs_that_work() -> None:
    pairs = Pairs(BreakerRules())
    pairs.fail("P0", "D0", 0.0, "500")
    for now in range(1, 50):
        pairs.worked("P1", "D0", float(now))
    assert pairs.bad
    pairs.worked("P0", "D0", 50.0)
    assert not pairs.bad
    assert vars(pairs)["_worked_at"] == {}


def test_another_engine_at_the_address_is_another_half_of_the_pair() -> None:
    pairs = Pairs(BreakerRules())
    for now in (0.0, 0.1, 0.2):
        pairs.fail("P0", "D0", now, "500")
    pairs.forget("P0")
    assert pairs.may("P0", "D0", 0.3)
    assert pairs.failed == {("P0", "D0"): 3}


class Clock:
    """Stands for the fleet's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("baton.proxy.fleet.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    yield Clock(monkeypatch)


def up(prefill: int, decode: int) -> tuple[Fleet, list[ProxyInstance], list[ProxyInstance]]:
    made = fleet(prefill, decode, usable=False)
    for instance in made:
        instance.probed(True, "test")
    return made, made.pools[Role.PREFILL], made.pools[Role.DECODE]


def serve_round(made: Fleet, poisoned: ProxyInstance, turn: Iterator[int]) -> int:
    """One request by turns on what is usable; how many hand-offs failed."""
    number = next(turn)
    prefills, decodes = made.usable(Role.PREFILL), made.usable(Role.DECODE)
    prefill = prefills[number % len(prefills)]
    decode = next(
        each
        for shift in range(len(decodes))
        if made.may_pair(prefill, each := decodes[(number // len(prefills) + shift) % len(decodes)])
    )
    if not prefill.usable:
        prefill.try_now()
    if prefill is poisoned:
        decode.leg_bad("a request was answered 500")
        made.pair_failed(prefill, decode, "500")
        return 1
    decode.leg_good()
    made.pair_worked(prefill, decode)
    return 0


def test_a_poisoned_prefill_server_is_taken_out_and_no_decode_server_for_it(clock: Clock) -> None:
    made, prefills, decodes = up(2, 2)
    turn = count()
    failed = 0
    for _ in range(100):
        clock.now += 0.001
        failed += serve_round(made, prefills[1], turn)
    assert failed <= 6
    assert not prefills[1].usable
    assert prefills[1].state() is InstanceState.OPEN
    assert "P1 to D" in prefills[1].last_error
    assert all(each.usable and not each.breaker.failures for each in decodes)
    assert prefills[1].ejections == {"transfers": 1}
    assert not any(each.ejections.total() for each in decodes)


def test_three_poisoned_of_four_leave_the_fourth_and_all_decode_servers(clock: Clock) -> None:
    made, prefills, decodes = up(4, 1)
    turn = count()
    # with one decode server and only one good ticket in four
    for _ in range(100):
        clock.now += 0.001
        number = next(turn)
        usable = made.usable(Role.PREFILL)
        prefill = usable[number % len(usable)]
        if not made.may_pair(prefill, decodes[0]):
            continue
        if prefill is prefills[0]:
            decodes[0].leg_good()
            made.pair_worked(prefill, decodes[0])
        else:
            decodes[0].leg_bad("500")
            made.pair_failed(prefill, decodes[0], "500")
    assert [each.usable for each in prefills] == [True, False, False, False]
    assert decodes[0].usable


def test_the_guilty_one_is_let_in_again_by_hand_offs_and_not_by_its_own_legs(clock: Clock) -> None:
    made, (_, guilty), (decode, _) = up(2, 2)
    guilty.blame("tickets fail")
    clock.now += 5.0
    for _ in range(10):
        guilty.leg_good()
    assert guilty.state() is InstanceState.HALF_OPEN
    # a bad trial, then good ones
    decode.leg_bad("500")
    made.pair_failed(guilty, decode, "500")
    assert guilty.state() is InstanceState.OPEN
    assert not decode.breaker.failures
    clock.now += 5.0
    for _ in range(2):
        assert guilty in made.usable(Role.PREFILL)
        guilty.try_now()
        assert guilty not in made.usable(Role.PREFILL)
        made.pair_worked(guilty, decode)
    assert guilty.usable


def test_what_comes_of_hand_offs_with_one_that_has_left_is_not_kept(clock: Clock) -> None:
    made, (first, _), (decode, _) = up(2, 2)
    made.pair_failed(first, decode, "500")
    made.remove(first)
    made.pair_failed(first, decode, "500")
    made.pair_worked(first, decode)
    assert made.pairs.failed == {}
    assert not made.pairs.bad


def test_several_engines_behind_one_address_are_not_taken_for_restarts(clock: Clock) -> None:
    made, (first, _), _ = up(2, 2)
    void: list[str] = []
    made.on_new_engine(lambda each: void.append(each.id))
    for turn in range(20):
        first.hear({"remote_engine_id": f"engine-{turn % 2}_dp{turn % 3}"})
    assert len(void) == 1


def test_each_restart_voids_what_was_known_once(clock: Clock) -> None:
    made, (first, _), _ = up(2, 2)
    void: list[str] = []
    made.on_new_engine(lambda each: void.append(str(each.engine_id)))
    for turn in range(5):
        for rank in (0, 1, 0):
            first.hear({"remote_engine_id": f"start-{turn}_dp{rank}"})
    assert void == [f"start-{turn}_dp0" for turn in range(1, 5)]
    assert first.came_up == 5


def test_one_of_which_nobody_knows_who_it_is_counts_as_another_when_it_was_out(clock: Clock) -> None:
    made, _, (decode, other) = up(2, 2)
    void: list[str] = []
    made.on_new_engine(lambda each: void.append(each.id))
    other.heard("known")
    for instance in (decode, other):
        instance.probed(False, "refused", certain=True)
        instance.probed(True, "again")
    assert void == ["D0"]


def test_another_engine_on_the_guilty_ones_address_is_not_guilty(clock: Clock) -> None:
    made, (_, guilty), (decode, _) = up(2, 2)
    guilty.heard("first")
    for _ in range(3):
        made.pair_failed(guilty, decode, "500")
    guilty.blame("tickets fail")
    guilty.heard("second")
    assert guilty.usable
    assert made.may_pair(guilty, decode)


def test_an_open_pair_is_tried_by_one_request_at_a_time() -> None:
    pairs = Pairs(BreakerRules(open_seconds=5.0))
    for now in (0.0, 0.1, 0.2):
        pairs.fail("P0", "D0", now, "500")
    assert pairs.may("P0", "D0", 5.3)
    pairs.chosen("P0", "D0", 5.3)
    assert not pairs.may("P0", "D0", 5.4)
    # whose end is never told
    assert pairs.may("P0", "D0", 10.4)
    pairs.chosen("P0", "D0", 10.4)
    pairs.fail("P0", "D0", 10.5, "500")
    assert not pairs.may("P0", "D0", 15.4)
    assert pairs.may("P0", "D0", 15.6)
    pairs.chosen("P0", "D0", 15.6)
    pairs.worked("P0", "D0", 15.7)
    assert pairs.may("P0", "D0", 15.7)
