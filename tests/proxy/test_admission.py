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
