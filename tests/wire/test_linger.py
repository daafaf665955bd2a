"""A request that the server must get, even when nobody waits for its answer any more."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest
import trustme

from baton.http import Origin, Pool, Timeouts, TooLate
from tests.proxy.fakes import until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    """What the server has seen: requests that came, and connections that were cut."""

    requests: list[bytes] = field(default_factory=list)
    cut: int = 0
    say: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)


@asynccontextmanager
async def listening(
    server_side: ssl.SSLContext | None = None, client_side: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Pool, Seen]]:
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

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
    pool = Pool(Origin("127.0.0.1", server.sockets[0].getsockname()[1], client_side), Timeouts())
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


def test_who_leaves_while_the_connection_is_made_has_sent_nothing() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        never = asyncio.Event()

        async def slow() -> object:
            return await never.wait()

        pool.connect = slow  # type: ignore[method-assign, assignment]
        exchange = pool.request(b"POST", b"/", (), (b"body",), linger_seconds=60.0)
        asking = asyncio.ensure_future(exchange.__aenter__())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not exchange.sent
        assert seen.requests == []

    run(test)


def test_a_request_is_delivered_without_waiting_for_its_answer() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        exchange = pool.request(b"POST", b"/", (), (b"body",), linger_seconds=60.0)
        await exchange.deliver()
        assert exchange.sent
        await until(lambda: len(seen.requests) == 1)
        assert seen.requests[0].endswith(b"body")
        assert seen.cut == 0
        seen.say.put_nowait(HEAD + b"1\r\nx\r\n")
        await until(lambda: seen.cut == 1)

    run(test)


def test_a_request_that_had_to_wait_too_long_for_its_connection_is_not_sent_and_the_connection_is_kept() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        exchange = pool.request(b"POST", b"/", (), (b"body",))
        exchange.send_by = 0.0
        with pytest.raises(TooLate):
            await exchange.__aenter__()
        assert not exchange.sent
        assert (pool.size, pool.busy) == (1, 0)

    run(test)


ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nticket"


async def ask_late(pool: Pool, came: list[tuple[int, bytes]], seconds: float = 60.0) -> None:
    exchange = pool.request(b"POST", b"/", (), (b"body",))
    exchange.late_seconds, exchange.late = seconds, lambda response, raw: came.append((response.status, raw))
    async with exchange as response:
        assert await response.read() == b"ticket"


@pytest.mark.parametrize("cut_at", [0, 10, len(ANSWER) - 3])
def test_an_answer_that_races_with_who_leaves_is_heard_all_the_same(cut_at: int) -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        came: list[tuple[int, bytes]] = []
        asking = asyncio.create_task(ask_late(pool, came))
        await until(lambda: len(seen.requests) == 1)
        if cut_at:
            seen.say.put_nowait(ANSWER[:cut_at])
            await asyncio.sleep(0.02)
        # said before the server can see that nobody waits
        seen.say.put_nowait(ANSWER[cut_at:])
        asking.cancel()
        await until(lambda: came == [(200, b"ticket")])
        await until(lambda: seen.cut == 1 and pool.size == 0)

    run(test)


def test_an_answer_that_is_here_when_its_reader_is_cancelled_is_not_lost() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        came: list[tuple[int, bytes]] = []
        asking = asyncio.create_task(ask_late(pool, came))
        await until(lambda: len(seen.requests) == 1)
        (connection,) = pool._all
        connection.data_received(ANSWER)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert came == [(200, b"ticket")]

    run(test)


def test_who_leaves_and_would_hear_a_late_answer_is_seen_to_have_left_at_once() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        came: list[tuple[int, bytes]] = []
        asking = asyncio.create_task(ask_late(pool, came))
        await until(lambda: len(seen.requests) == 1)
        asking.cancel()
        await until(lambda: seen.cut == 1)
        await until(lambda: pool.size == 0)
        assert came == []

    run(test)


def test_an_answer_that_was_read_is_not_heard_twice_and_its_connection_is_kept() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        came: list[tuple[int, bytes]] = []
        seen.say.put_nowait(ANSWER)
        await ask_late(pool, came)
        assert came == []
        assert (pool.size, pool.busy) == (1, 0)

    run(test)


def test_a_server_that_never_answers_is_cut_off_in_time() -> None:
    async def test(pool: Pool, seen: Seen) -> None:
        async def stubborn(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.requests.append(b"")
            await asyncio.sleep(60)

        server = await asyncio.start_server(stubborn, "127.0.0.1", 0)
        deaf = Pool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]), Timeouts())
        came: list[tuple[int, bytes]] = []
        asking = asyncio.create_task(ask_late(deaf, came, 0.05))
        await until(lambda: len(seen.requests) == 1)
        asking.cancel()
        await until(lambda: deaf.size == 0)
        server.close()

    run(test)


def test_over_tls_an_answer_on_its_way_is_heard_and_the_server_sees_us_leave_too() -> None:
    authority = trustme.CA()
    server_side = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(server_side)
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)

    async def test(pool: Pool, seen: Seen) -> None:
        for answered in (True, False):
            came: list[tuple[int, bytes]] = []
            seen.cut = 0
            asking = asyncio.create_task(ask_late(pool, came))
            await until(lambda: len(seen.requests) == 1)
            seen.requests.clear()
            if answered:
                # said, and not yet read
                (connection,) = pool._all
                connection.pause()
                seen.say.put_nowait(ANSWER)
                await asyncio.sleep(0.05)
            asking.cancel()
            await until(lambda: seen.cut == 1 and pool.size == 0)
            assert came == ([(200, b"ticket")] if answered else [])

    async def go() -> None:
        async with listening(server_side, client_side) as (pool, seen):
            await test(pool, seen)

    asyncio.run(go())
