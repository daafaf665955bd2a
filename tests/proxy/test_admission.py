from __future__ import annotations

import asyncio

import pytest

from baton.proxy.admission import Gate
from baton.proxy.errors import ProxyError


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_places_are_given_in_the_order_of_the_line() -> None:
    async def go() -> None:
        gate = Gate(1)
        await gate.enter()
        order: list[int] = []

        async def wait(number: int) -> None:
            await gate.enter()
            order.append(number)

        tasks = [asyncio.create_task(wait(number)) for number in range(3)]
        await turns()
        assert (gate.active, gate.waiting, order) == (1, 3, [])
        for done in range(1, 4):
            gate.leave()
            await turns()
            assert order == list(range(done))
            assert gate.active == 1
        gate.leave()
        assert (gate.active, gate.waiting) == (0, 0)
        await asyncio.gather(*tasks)

    asyncio.run(go())


def test_a_full_line_is_429() -> None:
    async def go() -> None:
        gate = Gate(1, queue=0)
        await gate.enter()
        with pytest.raises(ProxyError) as caught:
            await gate.enter()
        assert (caught.value.status, caught.value.retry_after) == (429, 1)
        assert gate.active == 1

    asyncio.run(go())


def test_who_waits_too_long_is_429_and_out_of_the_line() -> None:
    async def go() -> None:
        gate = Gate(1, wait_seconds=0.01)
        await gate.enter()
        with pytest.raises(ProxyError) as caught:
            await gate.enter()
        assert caught.value.status == 429
        assert (gate.active, gate.waiting) == (1, 0)
        gate.leave()
        assert gate.active == 0

    asyncio.run(go())


@pytest.mark.parametrize("given", [False, True])
def test_who_leaves_the_line_takes_no_place(given: bool) -> None:
    async def go() -> None:
        gate = Gate(1)
        await gate.enter()
        waiting = asyncio.create_task(gate.enter())
        await turns()
        if given:
            gate.leave()  # the place comes in the moment of leaving
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        if not given:
            gate.leave()
        assert (gate.active, gate.waiting) == (0, 0)

    asyncio.run(go())


def test_without_a_limit_all_come_in() -> None:
    async def go() -> None:
        gate = Gate()
        for _ in range(1000):
            await gate.enter()
        assert (gate.active, gate.waiting) == (1000, 0)

    asyncio.run(go())


def test_who_wants_several_places_waits_for_all_of_them_and_nobody_overtakes() -> None:
    async def go() -> None:
        gate = Gate(3)
        assert await gate.enter(2) == 2
        order: list[str] = []

        async def wait(name: str, places: int) -> int:
            taken = await gate.enter(places)
            order.append(name)
            return taken

        many, one = asyncio.create_task(wait("many", 9)), asyncio.create_task(wait("one", 1))
        await turns()
        assert (gate.active, gate.waiting) == (2, 2)
        assert not gate.try_enter()
        gate.leave(2)
        await turns()
        # more than there are is as many as there are
        assert (order, gate.active, await many) == (["many"], 3, 3)
        gate.leave(3)
        assert await one == 1
        gate.leave()
        assert (gate.active, gate.waiting) == (0, 0)

    asyncio.run(go())


def test_more_places_let_in_who_waits_and_fewer_send_nobody_away() -> None:
    async def go() -> None:
        gate = Gate(1)
        await gate.enter()
        waiting = [asyncio.create_task(gate.enter()) for _ in range(3)]
        gate.resize(1)
        await turns()
        assert (gate.active, gate.waiting) == (1, 3)
        gate.resize(3)
        await turns()
        assert (gate.active, gate.waiting) == (3, 1)
        gate.resize(1)
        gate.leave()
        gate.leave()
        await turns()
        assert (gate.active, gate.waiting) == (1, 1)
        gate.leave()
        await asyncio.gather(*waiting)
        assert (gate.active, gate.waiting) == (1, 0)

    asyncio.run(go())


def test_who_is_first_in_line_and_leaves_it_lets_the_next_in() -> None:
    async def go() -> None:
        gate = Gate(2)
        await gate.enter()
        many = asyncio.create_task(gate.enter(2))
        await turns()
        one = asyncio.create_task(gate.enter())
        await turns()
        assert gate.waiting == 2
        many.cancel()
        assert await one == 1
        assert (gate.active, gate.waiting) == (2, 0)

    asyncio.run(go())
