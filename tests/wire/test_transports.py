"""TLS, IPv6 and Unix sockets, by our client to our server; and what does not speak TLS, or is not trusted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import trustme
import uvloop

from baton.http import (
    Broken,
    ConnectFailed,
    Limits,
    Origin,
    Pool,
    Request,
    Responder,
    Server,
    Timeouts,
    TlsFailed,
)
from tests.wire.server import echo


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def server_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost", "127.0.0.1").configure_cert(context)
    return context


@pytest.fixture(scope="module")
def client_side(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a peer does, nothing of it is worth a line of ours or of the loop's."""
    with caplog.at_level(logging.WARNING):
        yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@contextlib.asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None, limits: Limits | None = None) -> AsyncIterator[tuple[Server, int]]:
    server = Server(echo, limits)
    ((_, port),) = await server.listen("127.0.0.1", 0, tls=tls)
    try:
        yield server, port
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def pool_to(origin: Origin, timeouts: Timeouts | None = None) -> AsyncIterator[Pool]:
    pool = Pool(origin, timeouts or Timeouts())
    try:
        yield pool
    finally:
        pool.close()
        while pool.size:
            await asyncio.sleep(0.001)


async def post(pool: Pool, body: bytes = b"hello") -> bytes:
    async with asyncio.timeout(20), pool.request(b"POST", b"/x", (), (body,)) as response:
        assert response.status == 200
        return await response.read()


def test_tls_both_ways_keeps_the_connection(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with (
            serving(server_side) as (server, port),
            pool_to(Origin("localhost", port, client_side)) as pool,
        ):
            assert [await post(pool) for _ in range(3)] == [b"POST /x hello"] * 3
            assert await post(pool, b"a" * 3_000_000) == b"POST /x " + b"a" * 3_000_000
            assert (pool.size, len(server.connections)) == (1, 1)

    asyncio.run(test())


def test_a_certificate_of_nobody_we_know_is_told_by_name(server_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with (
            serving(server_side) as (server, port),
            pool_to(Origin("localhost", port, ssl.create_default_context())) as pool,
        ):
            with pytest.raises(TlsFailed, match="not trusted"):
                await post(pool)
            assert pool.size == 0
            assert server.connections == set()

    asyncio.run(test())


def test_a_certificate_for_another_name_is_not_taken(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(server_side) as (_, port), pool_to(Origin("127.0.0.2", port, client_side)) as pool:
            with pytest.raises(ConnectFailed):
                await post(pool)
        async with serving(server_side) as (_, port):
            wrong = ssl.create_default_context()
            trustme.CA().configure_trust(wrong)
            async with pool_to(Origin("localhost", port, wrong)) as pool:
                with pytest.raises(TlsFailed, match="not trusted"):
                    await post(pool)

    asyncio.run(test())


def test_tls_to_a_plain_server_fails_by_name(client_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving() as (server, port), pool_to(Origin("localhost", port, client_side)) as pool:
            with pytest.raises(TlsFailed):
                await post(pool)
            while server.connections:
                await asyncio.sleep(0.001)
            assert pool.size == 0

    asyncio.run(test())


def test_plain_http_to_a_tls_server_is_broken_and_not_a_hang(server_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(server_side) as (server, port), pool_to(Origin("localhost", port)) as pool:
            with pytest.raises(Broken):
                await post(pool)
            assert server.connections == set()

    asyncio.run(test())


def test_a_client_that_never_shakes_hands_is_closed(server_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(server_side, Limits(head_seconds=0.1)) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    assert await reader.read() == b""
            writer.close()
            assert server.connections == set()

    asyncio.run(test())


def test_a_server_that_never_shakes_hands_is_given_up(client_side: ssl.SSLContext) -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            origin = Origin("localhost", mute.getsockname()[1], client_side)
            async with pool_to(origin, Timeouts(connect=0.1)) as pool:
                with pytest.raises(ConnectFailed, match=r"within 0\.1 s"):
                    await post(pool)
                assert pool.size == 0

    asyncio.run(test())


@pytest.mark.parametrize("word", [True, False])
def test_a_body_that_ends_with_a_tls_connection_must_end_by_its_word(
    word: bool, server_side: ssl.SSLContext, client_side: ssl.SSLContext
) -> None:
    """Whoever cuts the wire could else shorten an answer unseen. asyncio's own loop tells both ends alike."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"hello")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nall")
        await writer.drain()
        if word:
            writer.close()
        else:
            writer.transport.abort()

    async def test() -> None:
        server = await asyncio.start_server(script, "127.0.0.1", 0, ssl=server_side)
        async with pool_to(Origin("localhost", server.sockets[0].getsockname()[1], client_side)) as pool:
            if word or not isinstance(asyncio.get_running_loop(), uvloop.Loop):
                assert await post(pool) == b"all"
            else:
                with pytest.raises(Broken):
                    await post(pool)
        server.close()

    asyncio.run(test())


def test_refusals_arrive_over_tls_too(server_side: ssl.SSLContext, client_side: ssl.SSLContext) -> None:
    async def test() -> None:
        async with serving(server_side) as (server, port):
            reader, writer = await asyncio.open_connection("localhost", port, ssl=client_side)
            writer.write(b"nonsense\r\n\r\n")
            async with asyncio.timeout(10):
                assert (await reader.read()).startswith(b"HTTP/1.1 400")
                writer.close()
                while server.connections:
                    await asyncio.sleep(0.001)

    asyncio.run(test())


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1, so that IPv6 goes untested here")
def test_ipv6(server_side: ssl.SSLContext) -> None:
    hosts = []

    async def noting(request: Request, responder: Responder) -> None:
        hosts.append(request.header(b"host"))
        await echo(request, responder)

    async def test() -> None:
        server = Server(noting)
        ((host, port),) = await server.listen("::1", 0)
        assert host == "::1"
        async with pool_to(Origin("::1", port)) as pool:
            assert [await post(pool) for _ in range(2)] == [b"POST /x hello"] * 2
            assert pool.size == 1
        assert hosts == [b"[::1]:%d" % port] * 2
        await server.close()

    asyncio.run(test())


def test_unix_sockets(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def test() -> None:
        server = Server(echo)
        await server.listen_unix(path)
        async with pool_to(Origin("localhost", 0, path=path)) as pool:
            assert [await post(pool) for _ in range(3)] == [b"POST /x hello"] * 3
            assert await post(pool, b"a" * 3_000_000) == b"POST /x " + b"a" * 3_000_000
            assert (pool.size, len(server.connections)) == (1, 1)
        await server.close()
        async with pool_to(Origin("localhost", 0, path=path)) as pool:
            with pytest.raises(ConnectFailed):
                await post(pool)

    asyncio.run(test())


def test_a_unix_socket_that_a_crash_left_behind_is_taken_over(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")

    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(path)
        server = Server(echo)
        await server.listen_unix(path)
        async with pool_to(Origin("localhost", 0, path=path)) as pool:
            assert await post(pool) == b"POST /x hello"
        await server.close()

    asyncio.run(test())
