"""What is in flight on an instance always comes back to nothing, whatever becomes of its legs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.cluster import Endpoint, Role
from baton.http import Broken, ConnectFailed, OutOfDescriptors, TooSlow
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.upstream import Leg


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """No sockets: one loop will do."""


class Answered:
    """Stands for a response's head."""

    def __init__(self, status: int) -> None:
        self.status = status


class Scripted:
    """Stands for an exchange: it begins when it is told to, and ends in its own way."""

    def __init__(self, head: int | BaseException) -> None:
        self.head = head
        self.go = asyncio.Event()
        self.left = 0
        self.linger_seconds = 0.0

    async def __aenter__(self) -> Answered:
        await self.go.wait()
        if isinstance(self.head, BaseException):
            raise self.head
        return Answered(self.head)

    def leave(self) -> None:
        self.left += 1


HEADS = st.sampled_from(["200", "400", "429", "500", "503", "connect", "broken", "slow", "descriptors"])
ENDS = st.sampled_from(["good", "broken", "slow", "proxy", "bug"])
STEPS = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(["go", "end", "cancel", "probe", "reload"])), max_size=40)


def head_of(word: str) -> int | BaseException:
    errors: dict[str, BaseException] = {
        "connect": ConnectFailed("refused"),
        "broken": Broken("closed", began=False, reused=False),
        "slow": TooSlow("late"),
        "descriptors": OutOfDescriptors("ours"),
    }
    return errors.get(word) or int(word)


def end_of(word: str) -> BaseException | None:
    return {
        "broken": Broken("cut", began=True, reused=False),
        "slow": TooSlow("late"),
        "proxy": ProxyError(502, "a failed generation"),
        "bug": RuntimeError("a bug"),
    }.get(word)


class Legs:
    """Legs under way on two instances, each stepped by hand."""

    def __init__(self, plans: list[tuple[str, str]]) -> None:
        self.fleet = Fleet([Endpoint(role=Role.PREFILL, host="h", port=each) for each in (1, 2)])
        self.instances = list(self.fleet)
        self.under_way = [0, 0]
        self.exchanges: list[Scripted] = []
        self.ends: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        for number, (head, end) in enumerate(plans):
            exchange, may_end = Scripted(head_of(head)), asyncio.Event()
            self.exchanges.append(exchange)
            self.ends.append(may_end)
            instance = self.instances[number % 2]
            self.tasks.append(asyncio.create_task(self.run(instance, number % 2, exchange, may_end, end)))

    async def run(self, instance: ProxyInstance, place: int, exchange: Any, may_end: asyncio.Event, end: str) -> None:
        self.under_way[place] += 1
        try:
            async with Leg(instance, exchange, None):
                await may_end.wait()
                error = end_of(end)
                if error is not None:
                    raise error
        finally:
            self.under_way[place] -= 1

    async def step(self, number: int, what: str) -> None:
        place = number % len(self.tasks)
        match what:
            case "go":
                self.exchanges[place].go.set()
            case "end":
                self.ends[place].set()
            case "cancel":
                self.tasks[place].cancel()
            case "probe":
                self.instances[number % 2].probed(number % 3 > 0, "test", certain=number % 2 == 0)
            case "reload":
                known = self.fleet.at(Endpoint(role=Role.DECODE, host="h", port=3))
                if known is None:
                    self.fleet.add(Endpoint(role=Role.DECODE, host="h", port=3))
                else:
                    self.fleet.remove(known)
        for _ in range(3):
            await asyncio.sleep(0)
        assert [each.in_flight for each in self.instances] == self.under_way

    async def finish(self) -> None:
        for exchange, may_end in zip(self.exchanges, self.ends, strict=True):
            exchange.go.set()
            may_end.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(HEADS, ENDS), min_size=1, max_size=8), STEPS)
def test_counts_are_what_is_under_way_at_every_step_and_nothing_at_the_end(
    plans: list[tuple[str, str]], steps: list[tuple[int, str]]
) -> None:
    async def go() -> None:
        legs = Legs(plans)
        await asyncio.sleep(0)
        for number, what in steps:
            await legs.step(number, what)
        await legs.finish()
        assert [each.in_flight for each in legs.instances] == [0, 0]
        assert all(each.left <= 1 for each in legs.exchanges)

    asyncio.run(go())
