"""How an instance is chosen, from what is in flight."""

from __future__ import annotations

from collections import Counter

import pytest

from baton.cluster import Endpoint, Role
from baton.proxy.fleet import ProxyInstance
from baton.proxy.routing import POLICIES, LeastLoaded, Policy, PowerOfTwo, RandomChoice, RoundRobin
from tests.proxy.test_fleet import fleet


def pool(size: int) -> list[ProxyInstance]:
    return fleet(prefill=size).pools[Role.PREFILL]


def counted(policy: Policy, among: list[ProxyInstance], rounds: int) -> list[int]:
    found = Counter(policy.pick(among).place for _ in range(rounds))
    return [found[each.place] for each in among]


@pytest.mark.parametrize("make", [RoundRobin, LeastLoaded])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_an_idle_pool_is_used_evenly(make: type[RoundRobin] | type[LeastLoaded], size: int) -> None:
    found = counted(make(), pool(size), 100)
    assert max(found) - min(found) <= 1


@pytest.mark.parametrize("make", [RoundRobin, LeastLoaded])
def test_it_stays_even_when_instances_come_and_go(make: type[RoundRobin] | type[LeastLoaded]) -> None:
    policy, made = make(), fleet(prefill=3)
    counted(policy, made.pools[Role.PREFILL], 50)
    made.remove(made.pools[Role.PREFILL][1])
    made.add(Endpoint(role=Role.PREFILL, host="127.0.0.1", port=9000)).usable = True
    found = counted(policy, made.pools[Role.PREFILL], 99)
    assert max(found) - min(found) <= 1
    assert [each.id for each in made.pools[Role.PREFILL]] == ["P0", "P2", "P3"]


@pytest.mark.parametrize("make", [RandomChoice, PowerOfTwo])
def test_by_chance_nobody_is_left_out(make: type[RandomChoice] | type[PowerOfTwo]) -> None:
    found = counted(make(seed=1), pool(4), 4000)
    assert all(850 < each < 1150 for each in found)


def test_least_loaded_goes_where_least_is_under_way() -> None:
    among = pool(3)
    for instance, load in zip(among, (2, 0, 1), strict=True):
        instance.in_flight = load
    policy, order = LeastLoaded(), list[int]()
    for _ in range(6):
        chosen = policy.pick(among)
        chosen.in_flight += 1
        order.append(chosen.place)
    assert order[0] == 1
    assert [each.in_flight for each in among] == [3, 3, 3]


def test_power_of_two_takes_the_less_loaded_of_its_two_and_so_never_the_most_loaded_of_all() -> None:
    among = pool(3)
    for instance, load in zip(among, (5, 0, 1), strict=True):
        instance.in_flight = load
    found = counted(PowerOfTwo(seed=1), among, 300)
    assert found[0] == 0
    assert found[1] > found[2] > 0
    assert counted(PowerOfTwo(seed=1), among[:1], 3) == [3]


def test_every_policy_has_its_name() -> None:
    assert sorted(POLICIES) == ["least_loaded", "power_of_two", "random", "round_robin"]
    assert all(make().pick(pool(1)).id == "P0" for make in POLICIES.values())
