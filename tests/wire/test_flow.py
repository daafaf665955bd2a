"""Memory stays bounded, whoever is fast and whoever is slow."""

from __future__ import annotations

import asyncio

import pytest

from baton.http import Broken, Limits, Request, Responder
from tests.proxy.fakes import settled, until
from tests.wire.corpus import GET, OK, OK_CHUNKED
from tests.wire.drive import Call, Desk
from tests.wire.server import wire
from tests.wire.test_client import scripted

MIB = 1 << 20
PIECE = b"x" * 65536
WHOLE = 96 * MIB
READ_AT_ONCE = MIB  # more than either loop reads from a socket in one go
KERNEL = 24 * MIB  # more than the kernel holds in a connection's two buffers, twice


async def firehose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine that sends as fast as it is let."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(OK_CHUNKED)
    for _ in range(WHOLE // len(PIECE)):
        writer.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await reader.read()


def test_a_slow_client_of_a_fast_engine_costs_one_buffer() -> None:
    limits = Limits(write_buffer_bytes=256 << 10)
    passed = 0
    most_unsent = 0
    calls: list[str] = []

    async def test() -> None:
        async with scripted(firehose) as (pool, _):

            async def pass_on(request: Request, responder: Responder) -> None:
                (connection,) = made.server.connections
                transport = connection._transport
                assert transport is not None

                def sink(piece: bytes) -> None:
                    nonlocal passed, most_unsent
                    passed += len(piece)
                    responder.write(piece)
                    most_unsent = max(most_unsent, transport.get_write_buffer_size())

                async with pool.request(b"GET", b"/", ()) as response:
                    responder.start(200, [])

                    def pause() -> None:
                        calls.append("pause")
                        response.pause()

                    def resume() -> None:
                        calls.append("resume")
                        response.resume()

                    responder.on_pause, responder.on_resume = pause, resume
                    await response.feed(sink)
                    responder.end()

            async with wire(pass_on, limits) as made:
                reader, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=65536)
                writer.write(GET + b"Connection: close\r\n\r\n")
                got = 0
                for step in range(1, 9):
                    standing = await settled(lambda: passed)
                    assert got <= standing < got + KERNEL, f"read {got} bytes, but {standing} were taken"
                    while got < step * 4 * MIB:
                        got += len(await reader.read(65536))
                # Chunk headers are counted by the client, not by the sink.
                got += len(await reader.read(-1))
                assert passed == WHOLE
                assert WHOLE < got < WHOLE + MIB
                assert most_unsent <= limits.write_buffer_bytes + READ_AT_ONCE
                assert "pause" in calls
                # In turn; the last pause may outlive the answer.
                assert calls == (["pause", "resume"] * len(calls))[: len(calls)]
                writer.close()

    asyncio.run(test())


def test_a_client_that_asks_on_and_reads_nothing_gets_no_more_answers() -> None:
    answered = 0

    async def large(request: Request, responder: Responder) -> None:
        nonlocal answered
        answered += MIB
        responder.send(200, [], b"x" * MIB)

    async def test() -> None:
        async with wire(large) as made:
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=65536)
            writer.write((GET + b"\r\n") * 63 + GET + b"Connection: close\r\n\r\n")
            assert await settled(lambda: answered) < KERNEL
            # And all of them once it reads.
            raw = await reader.read()
            assert raw.count(b"x") == answered == 64 * MIB
            writer.close()

    asyncio.run(test())


def test_a_client_that_leaves_while_its_answer_waits_ends_the_handler() -> None:
    ended = asyncio.Event()

    async def stuck(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"x" * 32 * MIB)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def test() -> None:
        async with wire(stuck) as made:
            _, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=65536)
            writer.write(GET + b"\r\n")
            await until(lambda: bool(made.seen))
            # It shuts its side down and goes on holding the connection: nothing of what was written goes out.
            writer.write_eof()
            async with asyncio.timeout(10):
                await ended.wait()
            await until(lambda: not made.server.connections)
            writer.close()

    asyncio.run(test())


def test_a_request_of_a_client_that_is_behind_waits_until_it_has_caught_up() -> None:
    desk = Desk()
    desk.feed([GET + b"\r\n"])
    desk.connection.pause_writing()
    desk.feed([GET + b"\r\n", GET + b"\r\n"])
    assert len(desk.seen) == 1
    desk.connection.resume_writing()
    desk.work()
    assert len(desk.seen) == 3


def test_bodies_that_wait_are_bounded_by_their_bytes_too() -> None:
    desk = Desk(Limits(body_bytes=100, pipelined=16))
    one = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 60\r\n\r\n" + b"a" * 60
    taken = 0
    while desk.socket.reading and taken < 10:
        desk.connection.data_received(one)
        taken += 1
    # One is under way, one is not over the limit, and with the next they are.
    assert taken == 3
    desk.work()
    assert desk.socket.reading
    assert len(desk.seen) == 3


@pytest.mark.parametrize(
    "start",
    [
        GET + b"X: ",
        b"GET /",
        GET + b"X-",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: ",
    ],
)
def test_a_head_without_end_is_431_long_before_its_end(start: bytes) -> None:
    """The parser itself holds half a header for as long as it likes."""
    desk = Desk(Limits(head_bytes=10_000))
    desk.feed([start])
    sent = 0
    while not desk.socket.ended and sent < 100_000:
        desk.feed([b"a" * 100])
        sent += 100
    assert desk.socket.sent.startswith(b"HTTP/1.1 431")
    assert sent <= 10_200


def test_a_long_body_in_small_reads_is_no_head() -> None:
    desk = Desk(Limits(head_bytes=1000))
    desk.feed([b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"])
    desk.feed([b"a" * 10] * 10_000)
    assert [len(each.body) for each in desk.seen] == [100_000]


@pytest.mark.parametrize("start", [OK + b"X: ", b"HTTP/1.1 200 ", OK_CHUNKED + b"1;", OK_CHUNKED + b"0\r\nX: "])
def test_a_response_whose_head_has_no_end_is_broken(start: bytes) -> None:
    loop = asyncio.new_event_loop()
    call = Call(loop)
    call.feed([start])
    sent = 0
    while not call.socket.closed and sent < 4 * MIB:
        call.feed([b"a" * 1000])
        sent += 1000
    assert isinstance(call.error, Broken)
    assert sent < MIB
    loop.close()
