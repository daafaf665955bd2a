from __future__ import annotations

import pytest

from baton.cluster import Endpoint, Role
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.routing import RoundRobin


def fleet(prefill: int = 1, decode: int = 1, usable: bool = True) -> Fleet:
    made = Fleet(
        [Endpoint(role=Role.PREFILL, host="127.0.0.1", port=8100 + each) for each in range(prefill)]
        + [Endpoint(role=Role.DECODE, host="127.0.0.1", port=8200 + each) for each in range(decode)]
    )
    for instance in made:
        instance.usable = usable
    return made


def picks(pool_size: int, rounds: int, out: tuple[int, ...] = ()) -> list[int]:
    pool = [each for each in fleet(prefill=pool_size).pools[Role.PREFILL] if each.place not in out]
    policy = RoundRobin()
    return [policy.pick(pool).place for _ in range(rounds)]


def test_round_robin_takes_each_in_turn() -> None:
    assert picks(3, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_passes_over_one_that_is_out() -> None:
    assert picks(4, 6, out=(1,)) == [0, 2, 3, 0, 2, 3]


def test_round_robin_is_even_over_many_requests() -> None:
    counted = picks(3, 100)
    assert max(map(counted.count, range(3))) - min(map(counted.count, range(3))) <= 1


def test_round_robin_goes_on_when_its_last_choice_went_out() -> None:
    pool = fleet(prefill=3).pools[Role.PREFILL]
    policy = RoundRobin()
    assert policy.pick(pool).place == 0
    assert policy.pick(pool).place == 1
    assert policy.pick([pool[0], pool[2]]).place == 2
    assert policy.pick(pool).place == 0


def test_an_empty_pool_is_named() -> None:
    made = fleet(decode=2, usable=False)
    with pytest.raises(NoInstance, match=r"no decode server is usable \(2 known\)"):
        made.usable(Role.DECODE)


def test_ready_needs_one_of_each_role() -> None:
    made = fleet(prefill=2)
    assert made.ready()
    made.pools[Role.DECODE][0].usable = False
    assert not made.ready()
