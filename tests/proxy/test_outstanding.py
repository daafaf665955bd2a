"""Tickets that are out: counted, aged, and settled once."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from baton.cluster import Endpoint, Role, TransferMode
from baton.proxy.engine_info import BadEngineInfo, EngineInfo
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.outstanding import Outstanding
from baton.proxy.ticket import Ticket
from tests.proxy.push_fakes import about


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def made(lease: float | None = None, max_age: float | None = None) -> tuple[Outstanding, ProxyInstance, Clock]:
    clock = Clock()
    fleet = Fleet([Endpoint(role=Role.PREFILL, host="127.0.0.1", port=8100)])
    (instance,) = fleet.pools[Role.PREFILL]
    if lease is not None:
        instance.set_info(EngineInfo("e", TransferMode.READ, "h", 1, lease_seconds=lease))
    outstanding = Outstanding(max_age, clock)
    fleet.on_new_engine(outstanding.void)
    return outstanding, instance, clock


def counts(outstanding: Outstanding) -> tuple[int, int, int, int]:
    each = (outstanding.given, outstanding.used, outstanding.dropped, outstanding.expired)
    given, used, dropped, expired = (counter["P0"] for counter in each)
    return given, used, dropped, expired


def given(outstanding: Outstanding, instance: ProxyInstance, clock: Clock) -> Ticket:
    ticket = Ticket({"do_remote_prefill": True}, clock.now)
    outstanding.give(ticket, instance)
    return ticket


def test_a_ticket_is_out_until_it_is_used() -> None:
    outstanding, instance, clock = made()
    first, second = given(outstanding, instance, clock), given(outstanding, instance, clock)
    assert outstanding.count("P0") == 2
    outstanding.use(first)
    assert outstanding.count("P0") == 1
    outstanding.drop(second)
    assert outstanding.count("P0") == 0
    assert counts(outstanding) == (2, 1, 1, 0)


def test_a_ticket_is_settled_once() -> None:
    outstanding, instance, clock = made()
    ticket = given(outstanding, instance, clock)
    outstanding.use(ticket)
    outstanding.drop(ticket)
    outstanding.use(ticket)
    outstanding.leave(ticket, instance)
    assert counts(outstanding) == (1, 1, 0, 0)


def test_the_age_is_the_oldest_ones() -> None:
    outstanding, instance, clock = made()
    assert outstanding.oldest_seconds("P0") == 0.0
    first = given(outstanding, instance, clock)
    clock.now += 5
    given(outstanding, instance, clock)
    clock.now += 2
    assert outstanding.oldest_seconds("P0") == 7.0
    outstanding.use(first)
    assert outstanding.oldest_seconds("P0") == 2.0


def test_a_ticket_that_nobody_can_be_told_of_is_out_until_its_lease_is_over() -> None:
    outstanding, instance, clock = made(lease=2)
    ticket = given(outstanding, instance, clock)
    outstanding.leave(ticket, instance)
    clock.now += 1.9
    assert outstanding.count("P0") == 1
    clock.now += 0.2
    assert outstanding.count("P0") == 0
    assert counts(outstanding) == (1, 0, 0, 1)


def test_a_short_lease_behind_a_long_one_is_seen_to_be_over() -> None:
    outstanding, instance, clock = made(lease=480)
    outstanding.leave(given(outstanding, instance, clock), instance)
    instance.set_info(None)
    outstanding.leave(given(outstanding, instance, clock), instance)
    clock.now += 31
    assert outstanding.count("P0") == 1
    assert counts(outstanding) == (2, 0, 0, 1)


def test_one_that_is_in_use_does_not_expire() -> None:
    # its decode server renews the lease
    outstanding, instance, clock = made(lease=2)
    given(outstanding, instance, clock)
    clock.now += 3600
    assert outstanding.count("P0") == 1


@pytest.mark.parametrize(
    ("lease", "max_age", "seconds"), [(None, None, 20.0), (3, None, 2.0), (30, 5.0, 5.0), (None, 60.0, 60.0)]
)
def test_a_ticket_is_used_for_two_thirds_of_its_lease_or_as_long_as_was_said(
    lease: float | None, max_age: float | None, seconds: float
) -> None:
    outstanding, instance, clock = made(lease, max_age)
    assert outstanding.usable_until(given(outstanding, instance, clock), instance) == clock.now + seconds


def test_what_an_engine_gave_that_is_no_more_is_out_no_longer() -> None:
    outstanding, instance, clock = made(lease=30)
    given(outstanding, instance, clock)
    instance.set_info(None)
    assert outstanding.count("P0") == 1
    instance.set_info(EngineInfo("other", TransferMode.READ, "h", 1))
    assert outstanding.count("P0") == 0
    assert counts(outstanding) == (1, 0, 1, 0)


@pytest.mark.parametrize("said", [0, -1, "30", True, [30]])
def test_a_lease_that_is_none_is_nonsense(said: object) -> None:
    with pytest.raises(BadEngineInfo, match="kv_lease_seconds"):
        EngineInfo.parse(json.dumps(about("e", "kv_producer", kv_lease_seconds=said)).encode())
