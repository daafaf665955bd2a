"""The client on the wire: framing of responses, connections used again, and what breaks."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest

from baton.http import Broken, ConnectFailed, Origin, Pool, Timeouts, TooSlow
from baton.http.client_connection import ClientConnection
from tests.proxy.fakes import settled, until
from tests.wire.drive import Socket

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


def test_what_comes_after_an_answer_in_the_same_read_spoils_the_connection_and_not_the_answer() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH + b"rubbish")) as (pool, connections):
            assert [await get(pool) for _ in range(2)] == [(200, b"hello")] * 2
            assert connections == [0, 1]

    asyncio.run(test())


def test_a_trailer_is_no_header() -> None:
    raw = CHUNKED.replace(b"0\r\n\r\n", b"0\r\nX-Late: 1\r\n\r\n")

    async def test() -> None:
        async with scripted(answering(raw)) as (pool, connections):
            for _ in range(2):
                async with pool.request(b"GET", b"/", ()) as response:
                    assert await response.read() == b"hello"
                    assert [name for name, _ in response.headers] == [b"transfer-encoding"]
            assert connections == [0]

    asyncio.run(test())


@pytest.mark.parametrize("coding", [b"gzip, chunked", b"chunked, chunked", b"chunked\r\nTransfer-Encoding: chunked"])
def test_a_body_in_a_coding_that_nobody_undoes_is_broken_and_not_passed_on(coding: bytes) -> None:
    raw = CHUNKED.replace(b"chunked", coding)

    async def test() -> None:
        async with scripted(once(raw)) as (pool, _):
            with pytest.raises(Broken, match="chunked Transfer-Encoding"):
                await get(pool)

    asyncio.run(test())


def test_a_body_without_length_that_is_reset_is_broken() -> None:
    """Only an orderly end is one."""

    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
        await writer.drain()
        await read_by_client.wait()
        peer = writer.get_extra_info("socket")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    read_by_client = asyncio.Event()

    async def test() -> None:
        async with scripted(reset) as (pool, _), pool.request(b"GET", b"/", ()) as response:

            def sink(piece: bytes) -> None:
                read_by_client.set()

            with pytest.raises(Broken):
                await response.feed(sink)

    asyncio.run(test())


def test_closing_the_pool_breaks_what_is_under_way() -> None:
    async def test() -> None:
        held = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nhel")
            held.set()
            await reader.read()

        async with scripted(hold) as (pool, _), pool.request(b"GET", b"/", ()) as response:
            reading = asyncio.ensure_future(response.read())
            await held.wait()
            pool.close()
            with pytest.raises(Broken):
                await reading
            with pytest.raises(ConnectFailed, match="closed"):
                await get(pool)
            await until(lambda: pool.size == 0)

    asyncio.run(test())


def test_closing_the_pool_while_it_connects_leaves_nothing_open() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH)) as (pool, _):
            asking = asyncio.ensure_future(get(pool))
            await asyncio.sleep(0)
            pool.close()
            with pytest.raises(ConnectFailed, match="the pool is closed"):
                await asking
            assert pool.size == 0

    asyncio.run(test())


def test_a_server_that_hangs_up_at_once_is_an_error_and_never_a_hang() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async def test() -> None:
        async with scripted(hang_up) as (pool, _):
            for _ in range(50):
                with pytest.raises((ConnectFailed, Broken)):
                    await get(pool)
            await until(lambda: pool.size == 0)

    asyncio.run(test())


class OddLoop:
    """The running loop, but for how connections are made."""

    def __init__(self, create: Callable[[ClientConnection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._create = create

    async def create_connection(self, factory: Callable[[], ClientConnection], *_: object, **__: object) -> None:
        self._create(factory())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def test_what_a_failed_connection_leaves_is_cleared_away() -> None:
    """Each of these is a race that a loop may lose, and none of them may leak or hang."""
    made = Socket()

    def lost_before_it_is_used(connection: ClientConnection) -> None:
        connection.connection_made(cast(Any, made))
        connection.close()
        connection.connection_lost(None)

    def cancelled_once_made(connection: ClientConnection) -> None:
        connection.connection_made(cast(Any, made))
        raise asyncio.CancelledError

    def given_up_by_the_kernel(connection: ClientConnection) -> None:
        connection.connection_made(cast(Any, made))
        raise TimeoutError(110, "Connection timed out")

    async def test() -> None:
        nonlocal made
        pool = Pool(Origin("127.0.0.1", 1), Timeouts())
        for create, error, message in (
            (lost_before_it_is_used, ConnectFailed, "closed it at once"),
            (cancelled_once_made, asyncio.CancelledError, "^$"),
            (given_up_by_the_kernel, ConnectFailed, "no connection: Connection timed out"),
        ):
            made = Socket()
            loop = OddLoop(create)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("baton.http.client.asyncio.get_running_loop", lambda loop=loop: loop)
                with pytest.raises(error, match=message):
                    await pool.connect()
            assert made.aborted
            assert pool.size == 0

    asyncio.run(test())


def test_a_request_that_is_cancelled_at_any_turn_of_the_loop_leaks_no_connection() -> None:
    async def test() -> None:
        seen = []

        async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            seen.append(writer)
            await answering(LENGTH[:50], LENGTH[50:])(reader, writer)

        async with scripted(counted) as (pool, _):
            finished = 0
            for turns in range(60):
                asking = asyncio.ensure_future(get(pool))
                for _ in range(turns):
                    await asyncio.sleep(0)
                asking.cancel()
                try:
                    assert await asking == (200, b"hello")
                    finished += 1
                except asyncio.CancelledError:
                    pass
                # Whatever is left is idle and whole, on this side and on theirs.
                await until(lambda: pool.size == len(pool._idle))
                await until(lambda: sum(not writer.is_closing() for writer in seen) == pool.size)
                assert await get(pool) == (200, b"hello")
                pool.sweep()
            assert 0 < finished < 60

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


def test_who_watches_a_response_hears_that_it_broke_without_reading_it() -> None:
    async def go() -> None:
        async with scripted(once(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")) as (pool, _):
            heard: list[Exception] = []
            with pytest.raises(Broken):
                async with pool.request(b"GET", b"/", ()) as response:
                    response.watch(heard.append)
                    await until(lambda: len(heard) == 1)
                    # and who comes too late hears it, too
                    response.watch(heard.append)
                    assert len(heard) == 2
                    await response.read()

    asyncio.run(go())


def test_who_watches_a_response_hears_nothing_when_it_is_whole() -> None:
    async def go() -> None:
        async with scripted(answering(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc")) as (pool, _):
            heard: list[Exception] = []
            for _ in range(2):
                async with pool.request(b"GET", b"/", ()) as response:
                    response.watch(heard.append)
                    assert await response.read() == b"abc"
            assert heard == []

    asyncio.run(go())


def test_a_server_whose_host_vanishes_is_found_out_by_tcp() -> None:
    """After 25 s without a sign of it; the kernel by itself would wait for ever, or a quarter of an hour."""

    async def test() -> None:
        async with scripted(answering(LENGTH)) as (pool, _):
            connection = await pool.connect()
            assert connection._transport is not None
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            options = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
            assert options == [10, 5, 3, 25_000]

    asyncio.run(test())
