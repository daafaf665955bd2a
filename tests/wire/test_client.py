"""The client on the wire: framing of responses, connections used again, and what breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from baton.http import Broken, ConnectFailed, Origin, Pool, Timeouts, TooSlow
from tests.proxy.fakes import settled

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def scripted(script: Script, timeouts: Timeouts | None = None) -> AsyncIterator[tuple[Pool, list[int]]]:
    """A pool to a server that runs *script* for each connection, and the connections' numbers so far."""
    connections: list[int] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(len(connections))
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pool = Pool(Origin("127.0.0.1", server.sockets[0].getsockname()[1]), timeouts or Timeouts())
    try:
        yield pool, connections
    finally:
        pool.close()
        server.close()


def answering(*pieces: bytes) -> Script:
    """Answers every request of a connection with the same pieces, each in a write of its own."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return script


def once(*pieces: bytes) -> Script:
    """Answers one request and closes."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


async def get(pool: Pool, method: bytes = b"GET") -> tuple[int, bytes]:
    async with asyncio.timeout(10):
        async with pool.request(method, b"/", ()) as response:
            return response.status, await response.read()


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;x\r\nlo\r\n0\r\n\r\n"


@pytest.mark.parametrize("raw", [LENGTH, CHUNKED, b"HTTP/1.1 100 Continue\r\n\r\n" + LENGTH])
def test_a_response_is_the_same_wherever_it_is_cut_and_the_connection_is_used_again(raw: bytes) -> None:
    async def test() -> None:
        for at in range(1, len(raw)):
            async with scripted(answering(raw[:at], raw[at:])) as (pool, connections):
                assert [await get(pool) for _ in range(3)] == [(200, b"hello")] * 3
                assert connections == [0]

    asyncio.run(test())


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def test() -> None:
        async with scripted(once(b"HTTP/1.1 200 OK\r\n\r\nhel", b"lo")) as (pool, connections):
            assert await get(pool) == (200, b"hello")
            assert await get(pool) == (200, b"hello")
            assert connections == [0, 1]

    asyncio.run(test())


@pytest.mark.parametrize(
    ("raw", "began"),
    [
        (b"", False),
        (b"HTTP/1.1 200", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n", True),
        (b"nonsense\r\n\r\n", True),
    ],
)
def test_a_response_that_ends_early_is_an_error_and_never_a_short_body(raw: bytes, began: bool) -> None:
    async def test() -> None:
        async with scripted(once(raw)) as (pool, _):
            with pytest.raises(Broken) as caught:
                await get(pool)
            assert (caught.value.began, caught.value.reused) == (began, False)
            await asyncio.sleep(0)
            assert pool.size == 0

    asyncio.run(test())


def test_nobody_there_is_told_apart_from_broken() -> None:
    async def test() -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            pool = Pool(Origin("127.0.0.1", bound.getsockname()[1]), Timeouts())
            with pytest.raises(ConnectFailed):
                await get(pool)

    asyncio.run(test())


def test_a_head_that_does_not_come_is_too_slow_and_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        closed.set()

    async def test() -> None:
        async with scripted(mute, Timeouts(head=0.05)) as (pool, _):
            with pytest.raises(TooSlow):
                await get(pool)
            async with asyncio.timeout(10):
                await closed.wait()

    asyncio.run(test())


def test_leaving_before_the_body_is_read_closes_the_connection() -> None:
    closed = asyncio.Event()

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        closed.set()

    async def test() -> None:
        async with scripted(endless) as (pool, _):
            async with pool.request(b"GET", b"/", ()) as response:
                assert response.status == 200
            async with asyncio.timeout(10):
                await closed.wait()

    asyncio.run(test())


def test_a_connection_that_died_while_idle_is_not_used() -> None:
    async def test() -> None:
        async with scripted(once(LENGTH)) as (pool, connections):
            assert await get(pool) == (200, b"hello")
            while pool.size:
                await asyncio.sleep(0.001)
            assert await get(pool) == (200, b"hello")
            assert connections == [0, 1]

    asyncio.run(test())


def test_a_connection_that_was_idle_for_too_long_is_closed_by_us() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH), Timeouts(idle_connection=-1.0)) as (pool, connections):
            await get(pool)
            await get(pool)
            assert connections == [0, 1]
            pool.sweep()
            while pool.size:
                await asyncio.sleep(0.001)

    asyncio.run(test())


def test_bytes_that_nobody_asked_for_end_the_connection() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil")) as (
            pool,
            connections,
        ):
            assert await get(pool) == (200, b"hello")
            assert await get(pool) == (200, b"hello")
            assert connections == [0, 1]

    asyncio.run(test())


def test_many_at_once_each_get_their_own_connection_and_answer() -> None:
    async def numbered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = head.split(b" ")[1]
            await asyncio.sleep(0.01)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async def test() -> None:
        async with scripted(numbered) as (pool, connections):

            async def one(number: int) -> bytes:
                async with pool.request(b"GET", b"/%d" % number, ()) as response:
                    return await response.read()

            assert await asyncio.gather(*map(one, range(300))) == [b"/%d" % number for number in range(300)]
            assert len(connections) == 300
            await asyncio.gather(*map(one, range(300)))
            assert len(connections) == 300

    asyncio.run(test())


def test_a_paused_response_reads_no_more_until_resumed() -> None:
    sent = 0

    async def firehose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1000 * 65536))
        for _ in range(1000):
            writer.write(b"x" * 65536)
            await writer.drain()
            sent += 65536

    async def test() -> None:
        got = 0

        def sink(piece: bytes) -> None:
            nonlocal got
            got += len(piece)

        async with scripted(firehose) as (pool, _), pool.request(b"GET", b"/", ()) as response:
            response.pause()
            feeding = asyncio.ensure_future(response.feed(sink))
            assert await settled(lambda: sent) < 32 << 20
            response.resume()
            async with asyncio.timeout(30):
                await feeding
            assert got == 1000 * 65536

    asyncio.run(test())
