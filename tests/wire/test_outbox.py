"""Writes that are sent together at the end of a turn of the loop: none is lost, none overtakes another."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from baton.http import Request, Responder
from baton.http.outbox import BUSY, Outbox
from tests.wire.server import wire


class Socket:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def writelines(self, pieces: list[bytes]) -> None:
        self.got += pieces


def test_with_little_going_on_a_write_goes_out_at_once() -> None:
    socket = Socket()
    Outbox().write(cast(Any, socket), (b"a",), BUSY - 1)
    assert socket.got == [b"a"]


def test_with_much_going_on_it_waits_for_the_end_of_the_turn_and_nothing_overtakes_it() -> None:
    async def go() -> None:
        one, other, outbox = Socket(), Socket(), Outbox()
        outbox.write(cast(Any, one), (b"a", b"b"), BUSY)
        outbox.write(cast(Any, one), (b"c",), 0)
        outbox.write(cast(Any, other), (b"d",), 0)
        assert one.got == other.got == []
        await asyncio.sleep(0)
        assert (one.got, other.got) == ([b"a", b"b", b"c"], [b"d"])
        outbox.write(cast(Any, one), (b"e",), 0)
        assert one.got[-1] == b"e"

    asyncio.run(go())


def test_what_is_closed_meanwhile_is_not_written_to() -> None:
    async def go() -> None:
        socket, outbox = Socket(), Outbox()
        outbox.write(cast(Any, socket), (b"a",), BUSY)
        socket.closing = True
        await asyncio.sleep(0)
        assert socket.got == []

    asyncio.run(go())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_ends_its_connection_arrives_whole_with_much_going_on(streamed: bool) -> None:
    async def go() -> None:
        free = asyncio.Event()

        async def handler(request: Request, responder: Responder) -> None:
            if request.path == "/wait":
                await free.wait()
            if streamed:
                responder.start(200, [])
                responder.write(b"whole")
                responder.end()
            else:
                responder.send(200, [], b"whole")

        async with wire(handler) as made:
            head = b"GET /%b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
            waiting = [asyncio.ensure_future(made.talk([head % b"wait"])) for _ in range(2 * BUSY)]
            while len(made.seen) < 2 * BUSY:
                await asyncio.sleep(0)
            assert b"whole" in await made.talk([head % b"now"])
            free.set()
            assert all(b"whole" in raw for raw in await asyncio.gather(*waiting))
            assert made.server.busy == 0

    asyncio.run(go())
