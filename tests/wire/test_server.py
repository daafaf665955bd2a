"""The server on the wire: framing, limits, order, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from baton.http import Limits, Request, Responder
from baton.http.rules import Refused, check_head
from tests.proxy.fakes import settled, until
from tests.wire.server import Wire, echo, wire

CLOSE = b"GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


def on_wire(test: Callable[[Wire], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        async with wire(**options) as made:
            await test(made)

    asyncio.run(go())


def bodies(raw: bytes) -> list[bytes]:
    """The bodies of a run of answers with Content-Length."""
    found = []
    while raw:
        head, _, rest = raw.partition(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length")]
        found.append(rest[:length])
        raw = rest[length:]
    return found


TWO = (
    b"POST /one?q=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
    b"POST /two HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n" + CLOSE
)
THREE_BODIES = [b"POST /one?q=1 hello", b"POST /two abcdefg", b"GET /end "]


def test_pipelined_requests_are_answered_in_order_wherever_the_bytes_are_cut() -> None:
    async def test(made: Wire) -> None:
        for at in range(1, len(TWO)):
            assert bodies(await made.talk([TWO[:at], TWO[at:]])) == THREE_BODIES

    on_wire(test)


def test_byte_by_byte_is_the_same() -> None:
    async def test(made: Wire) -> None:
        assert bodies(await made.talk([TWO[at : at + 1] for at in range(len(TWO))])) == THREE_BODIES

    on_wire(test)


POST = b"POST / HTTP/1.1\r\nHost: a\r\n"

SMUGGLED = {
    "two lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "two equal lengths": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na",
    "length list": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1, 1\r\n\r\na",
    "length and chunked": POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked and length": POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "negative length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    "signed length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: +1\r\n\r\na",
    "hex length": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 0x1\r\n\r\na",
    "identity coding": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: identity\r\n\r\n",
    "coding not last": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked in 1.0": b"POST / HTTP/1.0\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk size": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
    "signed chunk size": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\na\r\n0\r\n\r\n",
    "chunk without its CRLF": b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n0\r\n\r\n",
    "space before the colon": b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length : 1\r\n\r\na",
    "folded header": b"POST / HTTP/1.1\r\nHost: a\r\nX: b\r\n c\r\n\r\n",
    "bare CR in a header": b"POST / HTTP/1.1\r\nHost: a\r\nX: b\rc\r\n\r\n",
    "NUL in a header": b"POST / HTTP/1.1\r\nHost: a\r\nX: b\0c\r\n\r\n",
    "NUL in a name": b"POST / HTTP/1.1\r\nHost: a\r\nX\0: b\r\n\r\n",
    "no host": b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n",
    "two hosts": b"POST / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "another version": b"GET / HTTP/3.0\r\nHost: a\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a tunnel": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    "an upgrade": b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.parametrize("shape", SMUGGLED)
def test_a_request_that_two_parsers_could_read_in_two_ways_is_refused(shape: str) -> None:
    """And nothing after it on the connection is taken for a request."""

    async def test(made: Wire) -> None:
        raw = await made.talk([SMUGGLED[shape] + CLOSE])
        assert raw.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), raw
        assert raw.count(b"content-length: ") == 1
        assert made.seen == []

    on_wire(test)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /" + b"a" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 2000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 20 + b"\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 101\r\n\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n" + b"a" * 101 + b"\r\n", b"413"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: magic\r\n\r\n", b"417"),
    ],
)
def test_each_limit_has_its_status(sent: bytes, status: bytes) -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([sent])
        assert raw.split(b" ")[1] == status
        assert made.seen == []

    on_wire(test, limits=Limits(head_bytes=1000, headers=10, body_bytes=100))


def test_a_body_that_is_too_long_by_its_own_word_is_refused_before_it_is_sent() -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 101\r\n\r\n"])
        assert raw.startswith(b"HTTP/1.1 413")

    on_wire(test, limits=Limits(body_bytes=100))


def test_expect_continue_is_answered_before_the_body() -> None:
    async def test(made: Wire) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await reader.readuntil(b"POST / ok")).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    on_wire(test)


def test_a_request_that_does_not_arrive_in_time_is_408_and_an_idle_connection_is_closed() -> None:
    async def test(made: Wire) -> None:
        assert (await made.talk([b"POST / HTTP/1.1\r\nHost: a\r\nContent-Le"])).startswith(b"HTTP/1.1 408")
        assert await made.talk([]) == b""

    on_wire(test, limits=Limits(head_seconds=0.1, idle_seconds=0.1))


def test_head_has_the_length_and_no_body() -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([b"HEAD /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"])
        assert raw.endswith(b"\r\n\r\n")
        assert b"content-length: 8\r\n" in raw

    on_wire(test)


def test_http_1_0_is_closed_unless_it_asks_otherwise() -> None:
    async def test(made: Wire) -> None:
        assert b"connection: close" in await made.talk([b"GET / HTTP/1.0\r\n\r\n"])
        kept = await made.talk([b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\nGET / HTTP/1.0\r\n\r\n"])
        assert bodies(kept) == [b"GET / ", b"GET / "]

    on_wire(test)


async def pieces(request: Request, responder: Responder) -> None:
    responder.start(200, [])
    for piece in (b"one", b"", b"two"):
        responder.write(piece)
    responder.end()


def test_a_body_in_pieces_is_chunked_for_1_1_and_ends_with_the_connection_for_1_0() -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([CLOSE])
        assert raw.endswith(b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n")
        raw = await made.talk([b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"])
        assert raw.endswith(b"connection: close\r\n\r\nonetwo")
        assert b"chunked" not in raw

    on_wire(test, handler=pieces)


def test_an_answer_that_is_not_finished_cannot_be_taken_for_a_whole_one() -> None:
    async def half(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"half")
        await asyncio.sleep(0.05)
        raise ValueError("boom")

    async def test(made: Wire) -> None:
        assert b"0\r\n\r\n" not in await made.talk([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"])

    on_wire(test, handler=half)


def test_a_handler_that_fails_is_a_500_and_the_connection_goes_on() -> None:
    async def fail_first(request: Request, responder: Responder) -> None:
        if request.path == "/":
            raise ValueError("boom")
        responder.send(200, [], b"fine")

    async def test(made: Wire) -> None:
        raw = await made.talk([b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + CLOSE])
        assert bodies(raw) == [b"500 internal error\n", b"fine"]

    on_wire(test, handler=fail_first)


def test_a_slow_client_pauses_whoever_feeds_it_and_memory_stays_bounded() -> None:
    fed = {"bytes": 0, "pauses": 0}
    piece = b"x" * 65536

    async def firehose(request: Request, responder: Responder) -> None:
        go = asyncio.Event()
        go.set()

        def pause() -> None:
            fed["pauses"] += 1
            go.clear()

        responder.on_pause, responder.on_resume = pause, go.set
        responder.start(200, [])
        for _ in range(1000):
            await go.wait()
            responder.write(piece)
            fed["bytes"] += len(piece)
            await asyncio.sleep(0)
        responder.end()

    async def test(made: Wire) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port, limit=65536)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        await until(lambda: fed["pauses"] > 0)
        # Nothing is read: what the kernel and we hold fills up, and then it stands still.
        assert await settled(lambda: fed["bytes"]) < 32 << 20
        raw = await reader.read()
        assert raw.count(b"x") == 1000 * len(piece)
        writer.close()

    on_wire(test, handler=firehose)


def test_a_refusal_arrives_although_the_client_is_still_sending() -> None:
    """A socket closed with unread bytes is reset, and what was written on it lost."""

    async def test(made: Wire) -> None:
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
            writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9000000\r\n\r\n" + b"a" * 9_000_000)
            async with asyncio.timeout(10):
                await writer.drain()
                assert (await reader.read()).startswith(b"HTTP/1.1 413")
            writer.close()
        assert made.seen == []
        await until(lambda: not made.server.connections)

    on_wire(test, limits=Limits(body_bytes=100))


def test_what_came_before_a_bad_request_is_answered_first() -> None:
    async def slow(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0.01)
        responder.send(200, [], request.target)

    async def test(made: Wire) -> None:
        good = b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(3))
        raw = await made.talk([good + b"GET / HTTP/1.1\r\nHost : a\r\n\r\n" + good])
        assert bodies(raw) == [b"/0", b"/1", b"/2", b"400 the request is not valid HTTP/1.1\n"]

    on_wire(test, handler=slow)


def test_a_client_that_waits_for_its_100_behind_another_request_gets_it() -> None:
    release = asyncio.Event()

    async def held(request: Request, responder: Responder) -> None:
        if request.path == "/first":
            await release.wait()
        await echo(request, responder)

    async def test(made: Wire) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"GET /first HTTP/1.1\r\nHost: a\r\n\r\n")
        writer.write(b"POST /second HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await until(lambda: bool(made.seen))
        release.set()
        async with asyncio.timeout(10):
            before = await reader.readuntil(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert before.startswith(b"HTTP/1.1 200 OK")
            writer.write(b"ok")
            assert (await reader.readuntil(b"POST /second ok")).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    on_wire(test, handler=held)


def test_http_1_0_knows_no_100() -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nok"])
        assert raw.startswith(b"HTTP/1.1 200 OK")

    on_wire(test)


def test_a_handler_that_says_nothing_is_a_500_and_not_a_hang() -> None:
    async def silent(request: Request, responder: Responder) -> None:
        return

    async def test(made: Wire) -> None:
        assert (await made.talk([CLOSE])).startswith(b"HTTP/1.1 500")

    on_wire(test, handler=silent)


def test_a_trailer_is_no_header_of_this_request_nor_of_the_next() -> None:
    trailed = POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nAuthorization: evil\r\nHost: evil\r\n\r\n"

    async def test(made: Wire) -> None:
        assert bodies(await made.talk([trailed + CLOSE])) == [b"POST / a", b"GET /end "]
        assert [name for request in made.seen for name, _ in request.headers] == [
            b"host",
            b"transfer-encoding",
            b"host",
            b"connection",
        ]

    on_wire(test)


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://a/x/y?z=1", b"/x/y?z=1"),
        (b"HTTPS://a:1/x", b"/x"),
        (b"http://a", b"/"),
        (b"http://a?z=1", b"/?z=1"),
    ],
)
def test_a_whole_url_is_taken_for_its_path(target: bytes, path: bytes) -> None:
    async def test(made: Wire) -> None:
        raw = await made.talk([b"GET %b HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" % target])
        assert bodies(raw) == [b"GET %b " % path]

    on_wire(test)


def test_many_may_come_at_once() -> None:
    async def test(made: Wire) -> None:
        with contextlib.ExitStack() as stack:
            # Nobody accepts as long as this doesn't wait: all of them stand in the queue.
            for _ in range(300):
                stack.enter_context(socket.create_connection(("127.0.0.1", made.port), timeout=0.9))
            await until(lambda: len(made.server.connections) == 300)

    on_wire(test)


def test_one_connection_too_many_is_503() -> None:
    async def test(made: Wire) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", made.port)
        await until(lambda: len(made.server.connections) == 1)
        assert (await made.talk([])).startswith(b"HTTP/1.1 503")
        writer.close()
        await until(lambda: not made.server.connections)
        assert (await made.talk([CLOSE])).startswith(b"HTTP/1.1 200")

    on_wire(test, limits=Limits(connections=1))


def test_pipelining_beyond_its_limit_pauses_and_loses_nothing() -> None:
    async def slow(request: Request, responder: Responder) -> None:
        await asyncio.sleep(0.001)
        responder.send(200, [], request.target)

    async def test(made: Wire) -> None:
        many = b"".join(b"GET /%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(200))
        raw = await made.talk([many + CLOSE])
        assert bodies(raw) == [b"/%d" % number for number in range(200)] + [b"/end"]

    on_wire(test, handler=slow, limits=Limits(pipelined=4))


def test_stopping_finishes_what_is_under_way_and_cuts_the_rest() -> None:
    release = asyncio.Event()

    async def held(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"first")
        await release.wait()
        responder.write(b"last")
        responder.end()

    async def test(made: Wire) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        await reader.readuntil(b"first\r\n")
        closing = asyncio.ensure_future(made.server.close(10))
        assert await idle_reader.read() == b""
        release.set()
        assert (await reader.read()).endswith(b"4\r\nlast\r\n0\r\n\r\n")
        await closing
        writer.close()
        idle_writer.close()

    on_wire(test, handler=held)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-length", b"1"), (b"content-length", b"1")], 400),
        ([(b"content-length", b"1"), (b"transfer-encoding", b"chunked")], 400),
        ([(b"content-length", b"1x")], 400),
        ([(b"content-length", b"")], 400),
        ([(b"transfer-encoding", b"gzip")], 501),
        ([(b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], 501),
        ([(b"content-length", b"101")], 413),
        ([(b"content-length", b"9" * 5000)], 413),
    ],
)
def test_a_head_is_checked_by_us_and_not_by_the_parser_alone(headers: list[tuple[bytes, bytes]], status: int) -> None:
    """The parser refuses most of these by itself today; a front door doesn't rest on that."""
    request = Request("POST", b"/", [(b"host", b"a"), *headers], http_1_0=False, keep_alive=True)
    with pytest.raises(Refused) as caught:
        check_head(request, Limits(body_bytes=100))
    assert caught.value.status == status
