"""The ledger, on a clock that stands still until it is moved."""

from __future__ import annotations

import pytest

from baton.sim import Lease, LeaseState, Ledger


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def freed() -> list[Lease]:
    return []


@pytest.fixture
def ledger(clock: Clock) -> Ledger:
    return Ledger(clock)


def give(ledger: Ledger, freed: list[Lease], name: str, seconds: float = 30.0, **more: bool) -> Lease:
    return ledger.give("p", name, [1, 2], tokens=40, seconds=seconds, on_end=freed.append, **more)


def test_a_lease_that_was_pulled_is_at_rest_and_its_blocks_are_freed_once(ledger: Ledger, freed: list[Lease]) -> None:
    lease = give(ledger, freed, "r")
    assert not ledger.at_rest()
    ledger.end(lease, LeaseState.PULLED)
    ledger.end(lease, LeaseState.RELEASED)
    assert ledger.at_rest()
    assert freed == [lease]
    assert lease.state is LeaseState.PULLED
    assert ledger.counts == {"given": 1, "pulled": 1}


def test_a_lease_ends_when_its_time_is_over(ledger: Ledger, clock: Clock, freed: list[Lease]) -> None:
    lease = give(ledger, freed, "r", 30.0)
    clock.now = 29.9
    assert not ledger.due()
    assert ledger.reap() == []
    clock.now = 30.1
    assert ledger.due()
    assert ledger.reap() == [lease]
    assert lease.state is LeaseState.EXPIRED
    assert ledger.find("p", "r") is None


def test_a_heartbeat_makes_it_last(ledger: Ledger, clock: Clock, freed: list[Lease]) -> None:
    lease = give(ledger, freed, "r", 2.0)
    for second in range(1, 20):
        clock.now = float(second)
        assert ledger.renew("p", "r", 2.0)
        assert ledger.reap() == []
    assert (lease.held, lease.renewed) == (True, 19)
    clock.now = 22.0
    assert ledger.reap() == [lease]
    assert not ledger.renew("p", "r", 2.0)


def test_a_renewed_lease_at_the_head_hides_no_expired_one(ledger: Ledger, clock: Clock, freed: list[Lease]) -> None:
    give(ledger, freed, "long", 480.0)
    head, short = give(ledger, freed, "head", 1.0), give(ledger, freed, "short", 2.0)
    ledger.renew("p", "head", 100.0)
    clock.now = 3.0
    assert ledger.reap() == [short]
    assert head.held


def test_an_engine_that_stands_still_looks_at_its_leases_when_it_wakes(
    ledger: Ledger, clock: Clock, freed: list[Lease]
) -> None:
    lease = give(ledger, freed, "r", 1.0)
    clock.now = 5.0
    assert ledger.reap(lambda engine: engine == "p") == []
    clock.now = 6.0
    assert ledger.reap() == [lease]


def test_what_an_engine_kept_is_lost_with_it(ledger: Ledger, freed: list[Lease]) -> None:
    lease = give(ledger, freed, "r")
    ledger.lose("p")
    assert lease.state is LeaseState.LOST
    assert ledger.at_rest()


def test_kept_turns_and_answers_that_never_arrived_are_no_leak(ledger: Ledger, freed: list[Lease]) -> None:
    give(ledger, freed, "turn", turn=True)
    give(ledger, freed, "cut").undelivered = True
    assert ledger.leaked() == []
    assert [lease.request_id for lease in ledger.held(turns=True)] == ["turn", "cut"]
    assert give(ledger, freed, "left") in ledger.leaked()


def test_poison_is_never_at_rest(ledger: Ledger) -> None:
    ledger.spoil("d", "p", "r", "no lease")
    assert not ledger.at_rest()
    assert ledger.as_dict()["poison"] == [
        {"at": 0.0, "reader": "d", "engine_id": "p", "request_id": "r", "why": "no lease"}
    ]
