"""`baton proxy` as a process: workers, Unix sockets, TLS, and running out of file descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest
import trustme
from aiohttp import web

from baton.cluster import Role
from tests.ports import free_port
from tests.proxy.fakes import FakeEngine, hang, prefill_answer, until

SECONDS = 60.0


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """The loop of the process under test is its own: once will do."""


@dataclass
class Running:
    """A proxy in a process of its own, and its engines."""

    process: asyncio.subprocess.Process
    prefill: FakeEngine
    decode: FakeEngine
    said: str

    @property
    def url(self) -> str:
        return self.said.split("listening on ")[1].split(",")[0]

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def running(*words: str, descriptors: int | None = None) -> AsyncIterator[Running]:
    engines = [FakeEngine(role) for role in Role]
    engines[1].ledger = engines[0].ledger
    for engine in engines:
        await engine.start()
    ports = [str(engine.endpoint.port) for engine in engines]
    limit = ["prlimit", f"--nofile={descriptors}:{descriptors}"] if descriptors is not None else []
    process = await asyncio.create_subprocess_exec(
        *limit,
        *(sys.executable, "-m", "baton.cli", "proxy", "--prefiller-ports", ports[0], "--decoder-ports", ports[1]),
        # What engines get is counted here; later words win.
        *("--no-warm-up", *words),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(SECONDS):
            said = (await process.stdout.readline()).decode()
        assert "listening on" in said, said
        yield Running(process, engines[0], engines[1], said)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        for engine in engines:
            assert engine.server is not None
            await engine.server.close()


def with_proxy(test: Callable[[Running], Awaitable[None]], *words: str, descriptors: int | None = None) -> None:
    async def go() -> None:
        async with running(*words, descriptors=descriptors) as made:
            await test(made)

    asyncio.run(go())


async def ask(url: str, count: int, **options: object) -> list[int]:
    """The statuses of *count* requests at once, each on a connection of its own."""

    async def one() -> int:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/v1/completions", json={"prompt": "a"}) as response,
        ):
            await response.read()
            return response.status

    return await asyncio.gather(*(one() for _ in range(count)))


async def takes_connections(url: str) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except OSError:
        return False
    writer.close()
    return True


def total(metrics: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith("baton_requests_total"))


def test_the_first_of_several_workers_warms_up_for_all_of_them() -> None:
    async def test(proxy: Running) -> None:
        async with asyncio.timeout(SECONDS), aiohttp.ClientSession() as client:
            # A connection each: the kernel spreads them over the workers.
            good = 0
            while good < 20:
                async with client.get(f"{proxy.url}/health", headers={"connection": "close"}) as response:
                    good = good + 1 if response.status == 200 else 0
        assert [len(proxy.prefill.bodies), len(proxy.decode.bodies)] == [1, 1]
        assert len(proxy.workers()) == 3

    with_proxy(test, "--port", str(free_port()), "--workers", "3", "--warm-up")


def test_workers_share_a_port_and_their_counts_add_up() -> None:
    port = str(free_port())

    async def test(made: Running) -> None:
        assert made.said.rstrip().endswith("2 workers")
        assert len(made.workers()) == 2
        assert set(await ask(made.url, 40)) == {200}
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{made.url}/metrics") as response:
                assert total(await response.text()) == 40
            # what is under way on one worker shows on any
            made.prefill.answer = hang
            asking = [asyncio.ensure_future(ask(made.url, 1)) for _ in range(8)]
            await until(lambda: len(made.prefill.bodies) == 48)
            async with client.get(f"{made.url}/instances") as response:
                rows = (await response.json())["instances"]
            assert [(row["id"], row["in_flight"], row["usable"]) for row in rows] == [("P0", 8, True), ("D0", 0, True)]
            for each in asking:
                each.cancel()
            await until(lambda: made.prefill.gone == 8)

        async def refused() -> tuple[int, str]:
            other = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "baton.cli", "proxy", "--port", port, "--workers", "2"),
                stderr=asyncio.subprocess.PIPE,
            )
            _, said = await other.communicate()
            return other.returncode or 0, said.decode()

        code, said = await refused()
        assert code == 1 and "ddress already in use" in said
        workers = made.workers()
        assert await made.stop() == 0
        await until(lambda: not any(each.is_running() for each in workers))

    with_proxy(test, "--workers", "2", "--port", port)


def test_a_worker_that_dies_is_started_again() -> None:
    async def test(made: Running) -> None:
        before = {each.pid for each in made.workers()}
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: len({each.pid for each in made.workers()} - before) == 1, SECONDS)
        await until(lambda: victim not in {each.pid for each in made.workers()}, SECONDS)

        async def both_count() -> bool:
            await ask(made.url, 4)
            async with aiohttp.ClientSession() as client, client.get(f"{made.url}/metrics") as response:
                return total(await response.text()) >= 8

        async with asyncio.timeout(SECONDS):
            while not await both_count():
                await asyncio.sleep(0.05)

    with_proxy(test, "--workers", "2", "--port", str(free_port()))


def test_no_two_workers_give_the_same_request_id_also_one_that_is_started_again() -> None:
    async def test(made: Running) -> None:
        before = {each.pid for each in made.workers()}
        assert await ask(made.url, 20) == [200] * 20
        victim = made.workers()[0]
        victim.kill()
        await until(lambda: len({each.pid for each in made.workers()} - before) == 1, SECONDS)
        # It takes its share of the connections from the moment it listens on.
        (again,) = (each for each in made.workers() if each.pid not in before)
        await until(lambda: listens(again), SECONDS)
        for _ in range(3):
            await ask(made.url, 10)
        for engine in (made.prefill, made.decode):
            ids = [said["x-request-id"] for said in engine.headers]
            assert len(ids) >= 20
            assert len(set(ids)) == len(ids)

    with_proxy(test, "--workers", "2", "--port", str(free_port()))


def listens(worker: psutil.Process) -> bool:
    return any(each.status == psutil.CONN_LISTEN for each in worker.net_connections("inet"))


def test_workers_end_with_the_process_that_started_them() -> None:
    async def test(made: Running) -> None:
        workers = made.workers()
        made.process.kill()
        await made.process.wait()
        await until(
            lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in workers), SECONDS
        )

    with_proxy(test, "--workers", "2", "--port", str(free_port()))


def test_a_stream_goes_on_while_its_worker_stops() -> None:
    async def test(made: Running) -> None:
        free = asyncio.Event()

        async def halting(engine: FakeEngine, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await free.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        made.decode.answer = halting
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{made.url}/v1/completions", json={"prompt": "a", "stream": True}) as response,
        ):
            await response.content.readuntil(b"\n\n")
            made.process.send_signal(signal.SIGINT)
            stopping = asyncio.ensure_future(made.process.wait())
            async with asyncio.timeout(SECONDS):
                while await takes_connections(made.url):
                    await asyncio.sleep(0.02)
            assert not stopping.done()
            free.set()
            assert await response.read() == b"data: [DONE]\n\n"
        async with asyncio.timeout(SECONDS):
            assert await stopping == 0

    with_proxy(test, "--workers", "2", "--port", str(free_port()))


async def sets_seen(url: str, rounds: int = 20) -> list[set[str]]:
    """What `/instances` says on *rounds* connections, which the kernel spreads over the workers: ids and states."""
    found = []
    async with aiohttp.ClientSession() as client:
        for _ in range(rounds):
            async with client.get(f"{url}/instances", headers={"connection": "close"}) as response:
                rows = (await response.json())["instances"]
                found.append({f"{row['id']} {row['state']} {row['url'].rpartition(':')[2]}" for row in rows})
    return found


async def all_see(url: str, wanted: set[str]) -> None:
    """Wait until every worker says *wanted*."""
    async with asyncio.timeout(SECONDS):
        while any(seen != wanted for seen in await sets_seen(url)):
            await asyncio.sleep(0.1)


def test_workers_agree_on_instances_that_come_and_go_also_one_that_is_started_again() -> None:
    async def test(made: Running) -> None:
        more = FakeEngine(Role.DECODE, made.prefill.ledger)
        await more.start()
        p0, d0, d1 = (str(each.endpoint.port) for each in (made.prefill, made.decode, more))
        async with aiohttp.ClientSession() as client:

            async def change(method: str, path: str, **body: str) -> int:
                options = {"json": body} if body else {}
                headers = {"connection": "close"}
                async with client.request(method, f"{made.url}{path}", headers=headers, **options) as response:
                    return response.status

            url = more.endpoint.url
            assert await change("POST", "/instances", role="decode", url=url) == 201
            assert {await change("POST", "/instances", role="decode", url=url) for _ in range(6)} == {409}
            await all_see(made.url, {f"P0 usable {p0}", f"D0 usable {d0}", f"D1 usable {d1}"})
            assert set(await ask(made.url, 20)) == {200}
            assert len(more.bodies) > 0
            assert await change("POST", "/instances/D0/drain") == 202
            await all_see(made.url, {f"P0 usable {p0}", f"D0 drained {d0}", f"D1 usable {d1}"})
            asked = len(made.decode.bodies)
            assert set(await ask(made.url, 20)) == {200}
            assert len(made.decode.bodies) == asked
            assert await change("DELETE", "/instances/D0") == 200
            await all_see(made.url, {f"P0 usable {p0}", f"D1 usable {d1}"})
            for victim in made.workers():
                victim.kill()
                await until(lambda victim=victim: len(made.workers()) == 3 and victim.pid not in pids(made))
                await takes_all(made)
                await all_see(made.url, {f"P0 usable {p0}", f"D1 usable {d1}"})
            assert await change("POST", "/instances", role="decode", url=made.decode.endpoint.url) == 201
            await all_see(made.url, {f"P0 usable {p0}", f"D1 usable {d1}", f"D2 usable {d0}"})
        assert more.server is not None
        await more.server.close()

    with_proxy(test, "--port", str(free_port()), "--workers", "3")


def pids(made: Running) -> set[int]:
    return {worker.pid for worker in made.workers()}


async def takes_all(made: Running) -> None:
    """Wait until every worker of *made* listens again: none says that another does not answer."""

    def listening() -> bool:
        with contextlib.suppress(psutil.Error):
            return all(
                any(each.status == psutil.CONN_LISTEN and each.laddr.port > 0 for each in worker.net_connections("tcp"))
                for worker in made.workers()
            )
        return False

    await until(listening)


def test_a_drain_waits_for_what_any_worker_has_on_the_instance() -> None:
    async def test(made: Running) -> None:
        made.decode.answer = hang
        async with aiohttp.ClientSession() as client:
            left = [asyncio.create_task(one_request(client, made.url)) for _ in range(8)]
            await until(lambda: len(made.decode.bodies) == 8)
            async with client.post(f"{made.url}/instances/D0/drain") as response:
                assert (await response.json())["state"] == "draining"
            await asyncio.sleep(1.0)
            assert all("D0 draining" in str(seen) for seen in await sets_seen(made.url))
            for each in left:
                each.cancel()
            d0, p0 = made.decode.endpoint.port, made.prefill.endpoint.port
            await all_see(made.url, {f"P0 usable {p0}", f"D0 drained {d0}"})

    with_proxy(test, "--port", str(free_port()), "--workers", "2")


async def one_request(client: aiohttp.ClientSession, url: str) -> None:
    headers = {"connection": "close"}
    async with client.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers) as response:
        await response.read()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_hangup_has_the_file_of_instances_read_again_for_all_workers(workers: str, tmp_path: Path) -> None:
    path = tmp_path / "instances.json"

    async def go() -> None:
        engines = [FakeEngine(role) for role in (Role.PREFILL, Role.DECODE, Role.DECODE)]
        for engine in engines:
            await engine.start()

        def write(*named: FakeEngine) -> None:
            path.write_text(json.dumps([{"role": each.role, "url": each.endpoint.url} for each in named]))

        write(*engines[:2])
        words = ("proxy", "--instances-file", str(path), "--port", str(free_port()), "--workers", workers)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "baton.cli", *words, "--no-warm-up"), stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            async with asyncio.timeout(SECONDS):
                said = (await process.stdout.readline()).decode()
            made = Running(process, engines[0], engines[1], said)
            p0, d0, d1 = (each.endpoint.port for each in engines)
            await all_see(made.url, {f"P0 usable {p0}", f"D0 usable {d0}"})
            write(engines[0], engines[2])
            process.send_signal(signal.SIGHUP)
            await all_see(made.url, {f"P0 usable {p0}", f"D1 usable {d1}"})
            path.write_text("[{")
            process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.5)
            await all_see(made.url, {f"P0 usable {p0}", f"D1 usable {d1}"})
            assert await made.stop() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for engine in engines:
                assert engine.server is not None
                await engine.server.close()

    asyncio.run(go())


def test_a_unix_socket_in_place_of_a_port(tmp_path: Path) -> None:
    path = tmp_path / "baton.sock"

    async def test(made: Running) -> None:
        assert f"listening on unix:{path}" in made.said
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client,
            client.post("http://baton/v1/completions", json={"prompt": "a"}) as response,
        ):
            assert response.status == 200
        assert await made.stop() == 0

    with_proxy(test, "--uds", str(path))


def test_https_for_clients(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(tmp_path / "server.pem"))
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def test(made: Running) -> None:
        assert made.url.startswith("https://")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusting)) as client:
            for stream in (False, True):
                body = {"prompt": "a", "stream": stream}
                async with client.post(f"{made.url}/v1/completions", json=body) as response:
                    assert response.status == 200
                    assert "one" in await response.text()

    with_proxy(test, "--ssl-certfile", str(tmp_path / "server.pem"), "--port", str(free_port()))


def test_out_of_descriptors_some_are_503_and_all_is_well_afterwards() -> None:
    """128 descriptors are enough for 32 clients and their engines; a hundred come at once."""

    async def test(made: Running) -> None:
        free = asyncio.Event()

        async def together(engine: FakeEngine, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
            await free.wait()
            return await prefill_answer(engine, request, body)

        made.prefill.answer = together
        asking = [asyncio.ensure_future(ask(made.url, 1)) for _ in range(100)]
        # all but those that wait for an engine have been told
        await until(lambda: len(made.prefill.bodies) + sum(each.done() for each in asking) == 100, SECONDS)
        assert 0 < len(made.prefill.bodies) <= 32
        free.set()
        async with asyncio.timeout(SECONDS):
            statuses = [status for (status,) in await asyncio.gather(*asking)]
        assert set(statuses) == {200, 503}
        assert statuses.count(200) == len(made.prefill.bodies)
        made.prefill.answer = None
        assert set(await ask(made.url, 10)) == {200}
        async with aiohttp.ClientSession() as client, client.get(f"{made.url}/instances") as response:
            assert all(row["usable"] for row in (await response.json())["instances"])

    with_proxy(test, "--port", str(free_port()), descriptors=128)


@pytest.mark.parametrize("worker_count", ["1", "2"])
def test_an_interrupt_ends_it_with_0(worker_count: str) -> None:
    async def test(made: Running) -> None:
        made.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(SECONDS):
            assert await made.process.wait() == 0

    with_proxy(test, "--workers", worker_count, "--port", str(free_port()))
