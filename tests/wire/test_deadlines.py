"""Deadlines: each of the client's, each of the server's, and that an answer in time is left alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from baton.http import Broken, ConnectFailed, Limits, Origin, Pool, Request, Responder, Timeouts, TooSlow
from tests.proxy.fakes import until
from tests.wire.drive import Desk
from tests.wire.server import wire
from tests.wire.test_client import LENGTH, Script, answering, get, scripted

# the client's


@pytest.fixture
def full() -> Iterator[Origin]:
    """Where the kernel takes no more connections: nobody accepts, and the queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                one.connect(listener.getsockname())
        yield Origin("127.0.0.1", listener.getsockname()[1])


def test_a_connection_that_does_not_come_is_connect_failed(full: Origin) -> None:
    async def test() -> None:
        pool = Pool(full, Timeouts(connect=0.05))
        with pytest.raises(ConnectFailed, match=r"no connection within 0\.05 s"):
            await get(pool)
        assert pool.size == 0

    asyncio.run(test())


def test_the_whole_time_counts_while_connecting_too(full: Origin) -> None:
    async def test() -> None:
        pool = Pool(full, Timeouts(connect=60.0, total=0.05))
        with pytest.raises(TooSlow, match=r"no connection within 0\.05 s"):
            await get(pool)
        assert pool.size == 0

    asyncio.run(test())


def test_a_callers_own_deadline_is_not_taken_for_ours(full: Origin) -> None:
    async def test() -> None:
        pool = Pool(full, Timeouts(connect=60.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), pool.request(b"GET", b"/", ()):
                pass
        assert pool.size == 0

    asyncio.run(test())


def saying(first: bytes, gone: asyncio.Event) -> Script:
    """Answers with these bytes, says no more, and notes when the client leaves."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(first)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()

    return script


SLOW_BODY = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"


@pytest.mark.parametrize(
    ("said", "times", "message"),
    [
        (b"", Timeouts(head=0.05), r"no answer within 0\.05 s"),
        (b"HTTP/1.1 200 OK\r\n", Timeouts(head=0.05), r"no answer within 0\.05 s"),
        (b"HTTP/1.1 100 Continue\r\n\r\n", Timeouts(head=0.05, total=60.0), r"no answer within 0\.05 s"),
        (b"", Timeouts(total=0.05), r"no whole answer within 0\.05 s"),
        (b"", Timeouts(head=60.0, total=0.05), r"no whole answer within 0\.05 s"),
        (SLOW_BODY, Timeouts(total=0.05), r"no whole answer within 0\.05 s"),
        (SLOW_BODY, Timeouts(head=0.04, total=0.08), r"no whole answer within 0\.08 s"),
    ],
)
def test_what_comes_too_late_is_too_slow_and_the_server_sees_us_leave(
    said: bytes, times: Timeouts, message: str
) -> None:
    async def test() -> None:
        gone = asyncio.Event()
        async with scripted(saying(said, gone), times) as (pool, _):
            with pytest.raises(TooSlow, match=message):
                await get(pool)
            async with asyncio.timeout(10):
                await gone.wait()
            await until(lambda: pool.size == 0)

    asyncio.run(test())


def test_a_fed_body_that_comes_too_late_is_too_slow_after_what_came() -> None:
    async def test() -> None:
        came: list[bytes] = []
        async with (
            scripted(saying(SLOW_BODY, asyncio.Event()), Timeouts(total=0.1)) as (pool, _),
            pool.request(b"GET", b"/", ()) as response,
        ):
            with pytest.raises(TooSlow):
                await response.feed(came.append)
            assert b"".join(came) == b"he"

    asyncio.run(test())


def test_the_head_deadline_ends_with_the_head() -> None:
    async def late_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(SLOW_BODY)
        await asyncio.sleep(0.3)
        writer.write(b"llo")

    async def test() -> None:
        async with scripted(late_body, Timeouts(head=0.1)) as (pool, _):
            assert await get(pool) == (200, b"hello")

    asyncio.run(test())


def test_a_request_in_time_leaves_no_clock_behind_for_the_next() -> None:
    """The connection is used again long after the first request's time was over."""

    async def test() -> None:
        async with scripted(answering(LENGTH), Timeouts(head=0.2, total=0.2)) as (pool, connections):
            began = time.monotonic()
            while time.monotonic() < began + 0.5:
                assert await get(pool) == (200, b"hello")
                await asyncio.sleep(0.01)
            assert connections == [0]

    asyncio.run(test())


def test_no_deadline_sets_no_timer() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH)) as (pool, _):
            await get(pool)
            assert pool._watch is None

    asyncio.run(test())


def test_one_timer_does_for_all_and_each_falls_due_in_its_turn() -> None:
    """Three requests that are never answered, a little after each other; a fourth is answered meanwhile."""

    async def test() -> None:
        async with scripted(saying(b"", asyncio.Event()), Timeouts(total=0.4)) as (pool, _):
            loop = asyncio.get_running_loop()

            async def ask(after: float) -> float:
                await asyncio.sleep(after)
                began = loop.time()
                with pytest.raises(TooSlow, match=r"no whole answer within 0\.4 s"):
                    await get(pool)
                return loop.time() - began

            waited = await asyncio.gather(*(ask(after) for after in (0.0, 0.1, 0.2)))
            assert all(seconds >= 0.399 for seconds in waited)
            assert pool.size == 0

    asyncio.run(test())


# the server's, on a clock that the test turns


HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n"
LIMITS = Limits(head_seconds=10, idle_seconds=100, stall_seconds=50)


def at(desk: Desk, seconds: float) -> None:
    """Set the clock, and let the server's sweep do what it does once a second."""
    desk.now = seconds
    if desk.connection.deadline <= desk.now:
        desk.connection.late()


def status(desk: Desk) -> bytes:
    return bytes(desk.socket.sent).rpartition(b"HTTP/1.1 ")[2][:3]


@pytest.mark.parametrize("said", [b"G", b"GET / HTTP/1.1\r\n", HEAD[:-2], HEAD, HEAD + b"hell"])
def test_a_request_that_stops_on_its_way_is_408(said: bytes) -> None:
    desk = Desk(LIMITS)
    desk.now = 50.0
    desk.feed([said])
    at(desk, 59.9)
    assert status(desk) == b""
    at(desk, 60.1)
    assert status(desk) == b"408"
    assert desk.socket.ended


def test_a_request_that_drips_is_408_as_well() -> None:
    desk = Desk(LIMITS)
    for number, byte in enumerate(HEAD * 2):
        at(desk, number / 2)
        desk.feed([bytes([byte])])
        if desk.socket.ended:
            break
    assert status(desk) == b"408"
    assert 9 < desk.now < 11


def test_a_second_request_has_its_own_time_from_the_answer_to_the_first_on() -> None:
    desk = Desk(LIMITS)
    desk.feed([HEAD + b"hello" + HEAD[:9]], at_once=False)
    at(desk, 9.0)
    desk.feed([HEAD[9:] + b"hello"])
    assert len(desk.seen) == 2
    desk.feed([HEAD[:9]])
    at(desk, 18.0)
    assert not desk.socket.ended
    at(desk, 19.1)
    assert status(desk) == b"408"


def test_half_a_request_behind_one_under_way_waits_with_it_and_is_408_afterwards() -> None:
    desk = Desk(LIMITS)
    desk.connection.data_received(HEAD + b"hello" + HEAD)
    at(desk, 1000.0)
    assert status(desk) == b""
    desk.work()
    assert status(desk) == b"200"
    at(desk, 1009.0)
    assert status(desk) == b"200"
    at(desk, 1010.1)
    assert status(desk) == b"408"


def test_an_idle_connection_is_closed_without_a_word() -> None:
    desk = Desk(LIMITS)
    desk.feed([HEAD + b"hello"])
    at(desk, 99.0)
    assert not desk.socket.closed
    at(desk, 100.1)
    assert desk.socket.closed
    assert bytes(desk.socket.sent).count(b"HTTP/1.1") == 1


def test_blank_lines_keep_no_connection_open() -> None:
    desk = Desk(LIMITS)
    for second in range(0, 106, 3):
        at(desk, second)
        if not desk.socket.closed:
            desk.feed([b"\r\n"])
    assert desk.socket.closed
    assert desk.socket.sent == b""


def test_who_was_refused_has_a_while_to_read_it_and_is_then_closed() -> None:
    desk = Desk(LIMITS)
    desk.feed([b"nonsense\r\n\r\n"])
    assert status(desk) == b"400"
    assert desk.socket.ended
    assert not desk.socket.closed
    desk.feed([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])
    at(desk, 2.1)
    assert desk.socket.closed
    assert desk.seen == []


def test_a_client_that_takes_nothing_is_cut_off_and_a_slow_one_is_not() -> None:
    desk = Desk(LIMITS)
    desk.feed([HEAD + b"hello"])
    desk.socket.unsent = 1000
    desk.connection.pause_writing()
    for turn in range(1, 6):
        desk.socket.unsent -= 1
        at(desk, turn * 50.1)
        assert not desk.socket.closed
    at(desk, 300.7)
    assert desk.socket.aborted


@pytest.mark.parametrize("more", [HEAD + b"hello", HEAD, b"nonsense\r\n\r\n"])
@pytest.mark.parametrize("answered", [True, False])
def test_asking_on_does_not_save_a_client_that_takes_nothing(more: bytes, answered: bool) -> None:
    desk = Desk(LIMITS)
    desk.connection.data_received(HEAD + b"hello")
    if answered:
        desk.work()
    desk.socket.unsent = 1000
    desk.connection.pause_writing()
    at(desk, 40.0)
    desk.connection.data_received(more)
    at(desk, 50.1)
    at(desk, 100.2)
    assert desk.socket.aborted
    desk.connection.connection_lost(None)


def test_a_closed_connection_whose_last_bytes_nobody_takes_is_cut_off() -> None:
    desk = Desk(LIMITS)
    desk.socket.unsent = 1000
    desk.feed([b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"])
    assert desk.socket.closed
    assert not desk.socket.aborted
    at(desk, 50.1)
    assert desk.socket.aborted


def test_the_sweep_does_it_on_the_wire() -> None:
    async def never(request: Request, responder: Responder) -> None:
        raise AssertionError

    async def test() -> None:
        limits = Limits(head_seconds=0.1, idle_seconds=0.1)
        async with wire(never, limits) as made:
            said = [made.talk([HEAD + b"hell"]), made.talk([b"P"]), made.talk([])]
            body, line, nothing = await asyncio.gather(*said)
            assert body.startswith(b"HTTP/1.1 408")
            assert line.startswith(b"HTTP/1.1 408")
            assert nothing == b""
            await until(lambda: not made.server.connections)

    asyncio.run(test())


def test_a_broken_answer_after_its_deadline_is_still_too_slow() -> None:
    """What the closed connection brings afterwards changes nothing."""

    async def test() -> None:
        async with scripted(saying(SLOW_BODY, asyncio.Event()), Timeouts(total=0.05)) as (pool, _):
            async with pool.request(b"GET", b"/", ()) as response:
                await until(lambda: pool.size == 0)
                for _ in range(2):
                    with pytest.raises(TooSlow):
                        await response.read()
            assert not issubclass(TooSlow, Broken)

    asyncio.run(test())


# silence


def test_a_server_that_says_nothing_is_given_up_by_who_looks() -> None:
    async def test() -> None:
        gone = asyncio.Event()
        async with scripted(saying(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", gone), Timeouts()) as (pool, _):
            async with pool.request(b"GET", b"/", ()) as response:
                (connection,) = pool._all
                # a look at 100 finds that the request went out since the last, which nobody knows of
                for now in (100.0, 104.9):
                    connection.hush(5.0, 0.0, now)
                    assert connection.open
                connection.hush(5.0, 60.0, 105.0)
                with pytest.raises(TooSlow, match="nothing was heard for 5 s"):
                    await response.read()
            await until(lambda: pool.size == 0)
            async with asyncio.timeout(10):
                await gone.wait()

    asyncio.run(test())


def test_silence_begins_anew_with_every_piece() -> None:
    async def test() -> None:
        more = asyncio.Event()

        async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(SLOW_BODY)
            await more.wait()
            writer.write(b"l")
            await reader.read()

        async with scripted(script, Timeouts()) as (pool, _):
            came: list[bytes] = []
            async with pool.request(b"GET", b"/", ()) as response:
                (connection,) = pool._all
                reading = asyncio.create_task(response.feed(came.append))
                await until(lambda: came == [b"he"])
                connection.hush(0.0, 5.0, 100.0)
                more.set()
                await until(lambda: came == [b"he", b"l"])
                for now in (105.0, 109.9):
                    connection.hush(0.0, 5.0, now)
                    assert connection.open
                connection.hush(0.0, 5.0, 110.0)
                with pytest.raises(TooSlow):
                    await reading

    asyncio.run(test())


def test_who_reads_nothing_hears_nothing_and_that_is_no_silence() -> None:
    async def test() -> None:
        async with scripted(saying(SLOW_BODY, asyncio.Event()), Timeouts()) as (pool, _):
            came: list[bytes] = []
            async with pool.request(b"GET", b"/", ()) as response:
                (connection,) = pool._all
                reading = asyncio.create_task(response.feed(came.append))
                await until(lambda: came == [b"he"])
                response.pause()
                for now in (100.0, 200.0, 300.0):
                    connection.hush(0.0, 5.0, now)
                response.resume()
                connection.hush(0.0, 5.0, 304.9)
                assert connection.open
                connection.hush(0.0, 5.0, 305.0)
                with pytest.raises(TooSlow):
                    await reading

    asyncio.run(test())


def test_who_has_a_clock_of_its_own_is_left_alone_and_the_next_on_the_connection_is_not() -> None:
    async def test() -> None:
        async with scripted(answering(LENGTH), Timeouts()) as (pool, _):
            patient = pool.request(b"GET", b"/", ())
            patient.patient = True
            async with patient as response:
                (connection,) = pool._all
                connection._complete = False  # its answer is not whole
                connection.hush(0.0, 0.0, 100.0)
                assert connection.open
                connection._complete = True
                assert await response.read() == b"hello"
            async with pool.request(b"GET", b"/", ()) as response:
                assert (connection.requests, connection.patient) == (2, False)
                await response.read()

    asyncio.run(test())
