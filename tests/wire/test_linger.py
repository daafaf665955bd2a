"""A request that the server must get, even when nobody waits for its answer any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

from baton.http import Origin, Pool, Timeouts
from tests.proxy.fakes import until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    """What the server has seen: requests that came, and connections that were cut."""

    requests: list[bytes] = field(default_factory=list)
    cut: int = 0
    say: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[Pool, Seen]]:
    """A server that says what the test puts into its queue."""
    seen = Seen()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.requests.append(await reader.readuntil(b"\r\n\r\n") + await reader.readexactly(4))
        ended = asyncio.ensure_future(reader.read())
        while not ended.done():
            saying = asyncio.ensure_future(seen.say.get())
            await asyncio.wait({ended, saying}, return_when=asyncio.FIRST_COMPLETED)
            if saying.done():
                writer.write(saying.result())
            else:
                saying.cancel()
        with suppress(ConnectionError):
            await ended
        seen.cut += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    pool = Pool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]), Timeouts())
    try:
        yield pool, seen
    finally:
        pool.close()
        server.close()


def run(test: Callable[[Pool, Seen], Awaitable[None]]) -> None:
    async def go() -> None:
        async with listening() as (pool, seen):
            await test(pool, seen)

    asyncio.run(go())


async def ask(pool: Pool, seconds: float) -> None:
    async with pool.request(b"POST", b"/", (), (b"bo", memoryview(b"xdy")[1:]), linger_seconds=seconds) as response:
        await response.read()


def test_who_leaves_before_the_head_stays_until_the_first_byte_of_the_body() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        asking = asyncio.create_task(ask(pool, 60.0))
        await until(lambda: len(seen.requests) == 1)
        assert seen.requests[0].endswith(b"body")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        seen.say.put_nowait(HEAD)
        await asyncio.sleep(0.05)
        assert seen.cut == 0
        seen.say.put_nowait(b"1\r\nx\r\n")
        await until(lambda: seen.cut == 1)
        await until(lambda: pool.size == 0)

    run(test)


def test_who_leaves_after_the_head_stays_as_well() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        headed = asyncio.Event()

        async def asked() -> None:
            async with pool.request(b"POST", b"/", (), (b"body",), linger_seconds=60.0) as response:
                headed.set()
                await response.feed(lambda _: None)

        asking = asyncio.create_task(asked())
        seen.say.put_nowait(HEAD)
        await headed.wait()
        asking.cancel()
        await asyncio.sleep(0.05)
        assert seen.cut == 0
        seen.say.put_nowait(b"1\r\nx\r\n")
        await until(lambda: seen.cut == 1)

    run(test)


def test_a_whole_answer_ends_it_too() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        asking = asyncio.create_task(ask(pool, 60.0))
        await until(lambda: len(seen.requests) == 1)
        asking.cancel()
        seen.say.put_nowait(b"HTTP/1.1 204 No Content\r\n\r\n")
        await until(lambda: seen.cut == 1)

    run(test)


def test_it_stays_no_longer_than_it_may() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        asking = asyncio.create_task(ask(pool, 0.05))
        await until(lambda: len(seen.requests) == 1)
        asking.cancel()
        seen.say.put_nowait(HEAD)
        await until(lambda: seen.cut == 1)

    run(test)


def test_who_leaves_in_the_body_cuts_at_once() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        pieces: list[bytes] = []

        async def asked() -> None:
            async with pool.request(b"POST", b"/", (), (b"body",), linger_seconds=60.0) as response:
                await response.feed(pieces.append)

        asking = asyncio.create_task(asked())
        seen.say.put_nowait(HEAD + b"1\r\nx\r\n")
        await until(lambda: pieces == [b"x"])
        asking.cancel()
        await until(lambda: seen.cut == 1)

    run(test)


def test_without_lingering_who_leaves_cuts_at_once() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        asking = asyncio.create_task(ask(pool, 0.0))
        await until(lambda: len(seen.requests) == 1)
        asking.cancel()
        await until(lambda: seen.cut == 1)

    run(test)


def test_who_leaves_while_the_connection_is_made_is_delivered_all_the_same() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        free, connect = asyncio.Event(), pool.connect
        waiting = 0

        async def slow() -> object:
            nonlocal waiting
            waiting += 1
            await free.wait()
            return await connect()

        pool.connect = slow  # type: ignore[method-assign, assignment]
        asking = asyncio.create_task(ask(pool, 60.0))
        await until(lambda: waiting == 1)
        asking.cancel()
        await until(lambda: waiting == 2)
        free.set()
        await until(lambda: len(seen.requests) == 1)
        assert seen.requests[0].endswith(b"body")
        seen.say.put_nowait(HEAD + b"1\r\nx\r\n")
        await until(lambda: seen.cut == 1)

    run(test)


def test_a_server_that_cannot_be_reached_any_more_is_no_error_of_anybody() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        free = asyncio.Event()
        connect = pool.connect

        async def slow() -> object:
            await free.wait()
            return await connect()

        pool.connect = slow  # type: ignore[method-assign, assignment]
        asking = asyncio.create_task(ask(pool, 60.0))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.sleep(0)
        pool.close()
        free.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert seen.requests == []

    run(test)
