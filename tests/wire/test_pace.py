"""A burst of requests is taken in parts: order is kept, nobody is forgotten, and a probe is answered between them."""

from __future__ import annotations

import asyncio

from baton.http.pace import AT_ONCE, Pace
from tests.wire.server import wire

BURST = 5 * AT_ONCE
HEAD = b"%b / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nConnection: close\r\n\r\nx"


async def begin(pace: Pace, number: int, begun: list[int]) -> None:
    if not pace.begins():
        await pace.turn()
    begun.append(number)


async def turns_of(begun: list[int], count: int) -> list[int]:
    """How many had begun after each turn of the loop, until *count* have."""
    counts = []
    while not counts or counts[-1] < count:
        await asyncio.sleep(0)
        counts.append(len(begun))
    return counts


def test_a_burst_begins_in_its_order_and_in_parts() -> None:
    async def go() -> None:
        begun: list[int] = []
        pace = Pace(asyncio.get_running_loop())
        tasks = [asyncio.create_task(begin(pace, number, begun)) for number in range(BURST)]
        counts = await turns_of(begun, BURST)
        assert max(after - before for before, after in zip([0, *counts], counts, strict=False)) == AT_ONCE
        assert begun == list(range(BURST))
        await asyncio.gather(*tasks)
        # It is over: who comes alone begins at once.
        assert pace.begins()

    asyncio.run(go())


def test_who_comes_later_does_not_overtake() -> None:
    async def go() -> None:
        begun: list[int] = []
        pace = Pace(asyncio.get_running_loop())
        tasks = [asyncio.create_task(begin(pace, number, begun)) for number in range(3 * AT_ONCE)]
        await turns_of(begun, AT_ONCE)
        tasks += [asyncio.create_task(begin(pace, number, begun)) for number in range(3 * AT_ONCE, BURST)]
        await asyncio.gather(*tasks)
        assert begun == list(range(BURST))

    asyncio.run(go())


def test_who_leaves_the_line_takes_nobodys_place() -> None:
    async def go() -> None:
        begun: list[int] = []
        pace = Pace(asyncio.get_running_loop())
        tasks = [asyncio.create_task(begin(pace, number, begun)) for number in range(4 * AT_ONCE)]
        await turns_of(begun, AT_ONCE)
        left = tasks[AT_ONCE : 3 * AT_ONCE]
        for task in left:
            task.cancel()
        before = len(begun)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert begun[before:] == [number for number in range(before, 4 * AT_ONCE) if number >= 3 * AT_ONCE]

    asyncio.run(go())


class Shut(Pace):
    """One where nobody's turn comes until :attr:`opened`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.opened = asyncio.Event()
        self.waiting = 0

    def begins(self) -> bool:
        return False

    async def turn(self) -> None:
        self.waiting += 1
        await self.opened.wait()


def test_a_probe_is_answered_while_requests_wait_for_their_turn() -> None:
    async def go() -> None:
        async with wire() as made:
            shut = made.server._pace = Shut(asyncio.get_running_loop())
            waits = asyncio.create_task(made.talk([POST]))
            leaves = asyncio.create_task(made.talk([POST]))
            async with asyncio.timeout(60):
                while shut.waiting < 2:
                    await asyncio.sleep(0.001)
                for method in (b"GET", b"HEAD"):
                    assert (await made.talk([HEAD % method])).startswith(b"HTTP/1.1 200")
                assert [request.method for request in made.seen] == ["GET", "HEAD"]
                leaves.cancel()
                while len(made.server.connections) > 1:
                    await asyncio.sleep(0.001)
                shut.opened.set()
                assert (await waits).startswith(b"HTTP/1.1 200")
            assert [request.method for request in made.seen] == ["GET", "HEAD", "POST"]

    asyncio.run(go())
