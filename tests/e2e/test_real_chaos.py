"""The campaign on real engines, a small one: killed, stopped, left by clients, out of blocks, with leases of 2 s.

1P2D behind a proxy, all with a KV cache so small that requests wait for blocks or are preempted. Whatever happens, an
answer is the right text or an error that the client can see, and afterwards nothing is left of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e import tiny
from tests.e2e.engines import START_SECONDS, Server, eventually
from tests.e2e.test_restarts import again, kill
from tests.e2e.test_write_mode import standing_still
from tests.e2e.topology import BLOCK, MODEL, Cluster, Engine, answers, cluster, prompts, used_kv

BYTES_A_TOKEN = 4 * 2 * 4 * 32 * 4
"""The tiny model's KV cache: layers x (K and V) x KV heads x head size x bytes."""
BLOCKS = 40
"""Of each engine. The longest request takes 16, and 8 run at a time."""
LEASE_SECONDS = 2
TOKENS = 48
CLIENTS, CANCELS = 6, 200
REST_SECONDS = 60.0
"""Within which all must be free again: engines publish their counters late."""

_EXTRA = {
    **{"kv_lease_duration": LEASE_SECONDS, "push_registration_timeout": 20},
    **{"push_answer_seconds": 8, "push_stall_seconds": 3},
}
FLAGS = (
    *("--kv-cache-memory-bytes", str(BLOCKS * BLOCK * BYTES_A_TOKEN)),
    *("--max-num-batched-tokens", str(4 * BLOCK)),
    *("--kv-transfer-config", json.dumps({"kv_connector_extra_config": _EXTRA})),
)
MODES = {"read": Engine(FLAGS), "write": Engine(("--transfer-mode", "write", *FLAGS))}


@dataclass
class Lab:
    """The cluster under attack.

    Attributes:
        asked, expected: prompts, and their answers by an engine that was left alone, by name.
        started: servers that were started again.
    """

    cluster: Cluster
    asked: dict[str, list[int]]
    expected: dict[str, str]
    logs: Path
    started: list[Server] = field(default_factory=list)

    @property
    def engines(self) -> list[Server]:
        return [*self.cluster.prefill, *self.cluster.decode]

    def state(self, name: str) -> str:
        with urllib.request.urlopen(f"{self.cluster.proxy.url}/instances", timeout=30) as response:
            return str({row["id"]: row["state"] for row in json.load(response)["instances"]}[name])

    def at_rest(self) -> None:
        """Nothing is left of what was asked: no gauge, no ticket, no block."""
        proxy = self.cluster.proxy
        for gauge in ("baton_active_requests", "baton_queued_requests", "baton_in_flight", "baton_tickets_outstanding"):
            left = eventually(lambda gauge=gauge: proxy.metric(gauge), 0.0, REST_SECONDS)  # type: ignore[misc]
            assert left == 0.0, gauge
        assert eventually(lambda: used_kv(self.engines), 0.0, REST_SECONDS) == 0.0
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            assert eventually(lambda gauge=gauge: sum(each.metric(gauge) for each in self.engines), 0.0) == 0.0  # type: ignore[misc]


@pytest.fixture(scope="module", params=["read", pytest.param("write", marks=pytest.mark.long)])
def lab(request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    engine = MODES[request.param]
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster(f"chaos-{request.param}", model, logs, prefill=(engine,), decode=(engine, engine)) as made:
        asked = prompts(seed=21)
        expected = answers(made.decode[0].url, asked, max_tokens=TOKENS)
        assert len(set(expected.values())) > len(expected) // 2
        lab = Lab(replace(made, prefill=list(made.prefill), decode=list(made.decode)), asked, expected, logs)
        try:
            yield lab
        finally:
            for server in lab.started:
                server.stop()


def verdict(status: int, raw: bytes, expected: str) -> str:
    """``right`` or ``error``: what a client has heard; anything else fails the test."""
    if status != 200:
        assert json.loads(raw)["error"]["message"], (status, raw)
        return "error"
    if raw.startswith(b"{"):
        text = json.loads(raw)["choices"][0]["text"]
        assert text == expected, f"garbage: {text!r}, not {expected!r}"
        return "right"
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert lines, "an empty stream with status 200"
    values = [json.loads(line) for line in lines if line != "[DONE]"]
    text = "".join(value["choices"][0]["text"] for value in values if value.get("choices"))
    if "error" in values[-1]:
        assert lines[-1] != "[DONE]"
        assert expected.startswith(text), f"garbage: {text!r} is no part of {expected!r}"
        return "error"
    assert lines[-1] == "[DONE]", f"a stream without an end: {lines[-1]!r}"
    assert text == expected, f"garbage: {text!r}, not {expected!r}"
    return "right"


async def ask(
    lab: Lab, session: aiohttp.ClientSession, name: str, *, stream: bool, patience: float | None = None
) -> str:
    """One request through the proxy; ``left`` when the client's patience was over first."""
    body = {"model": MODEL, "prompt": lab.asked[name], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    try:
        async with (
            asyncio.timeout(patience),
            session.post(f"{lab.cluster.proxy.url}/v1/completions", json={**body, "stream": stream}) as response,
        ):
            status, raw = response.status, await response.read()
    except TimeoutError:
        if patience is None:
            raise
        return "left"
    return verdict(status, raw, lab.expected[name])


def under_load(lab: Lab, disturb: Callable[[], None], seed: int) -> Counter[str]:
    """What clients hear that ask all the time, before, while and after something is done to an engine."""
    seen: Counter[str] = Counter()

    async def until(more: int, clients: Sequence[asyncio.Task[None]]) -> None:
        wanted, deadline = seen["right"] + more, time.monotonic() + START_SECONDS
        while seen["right"] < wanted:
            assert time.monotonic() < deadline, f"no right answers any more: {seen}"
            if any(client.done() for client in clients):
                await asyncio.gather(*clients)
            await asyncio.sleep(0.05)

    async def go() -> None:
        over = False
        limits = aiohttp.ClientTimeout(total=START_SECONDS)

        async def client(number: int) -> None:
            chance = random.Random(f"{seed}/{number}")
            names = list(lab.asked)
            while not over:
                heard = await ask(lab, session, chance.choice(names), stream=chance.random() < 0.5)
                seen[heard] += 1
                if heard == "error":
                    await asyncio.sleep(0.2)  # as a client would before it asks again

        async with aiohttp.ClientSession(timeout=limits) as session:
            clients = [asyncio.create_task(client(number)) for number in range(CLIENTS)]
            try:
                await until(CLIENTS, clients)
                await asyncio.to_thread(disturb)
                await until(2 * CLIENTS, clients)
                over = True
                await asyncio.gather(*clients)
            finally:
                for each in clients:
                    each.cancel()

    asyncio.run(go())
    print(dict(seen))
    return seen


def test_clients_that_leave_at_random_moments_leave_nothing(lab: Lab) -> None:
    chance = random.Random(11)
    plan = [(chance.choice(list(lab.asked)), chance.random() < 0.5, chance.uniform(0.0, 4.0)) for _ in range(CANCELS)]
    seen: Counter[str] = Counter()

    async def storm() -> None:
        async with aiohttp.ClientSession() as session:
            places = asyncio.Semaphore(2 * CLIENTS)

            async def one(name: str, stream: bool, patience: float) -> None:
                async with places:
                    seen[await ask(lab, session, name, stream=stream, patience=patience)] += 1

            await asyncio.gather(*(one(*each) for each in plan))

    asyncio.run(storm())
    print(dict(seen))
    assert seen["left"] > CANCELS / 10
    lab.at_rest()


def test_with_too_few_blocks_requests_wait_or_are_preempted_and_all_are_right(lab: Lab) -> None:
    """Of the prompts that take most, many more at once than there are blocks for."""
    names = sorted(lab.asked, key=lambda name: -len(lab.asked[name]))[:6]

    async def flood() -> list[str]:
        limits = aiohttp.ClientTimeout(total=START_SECONDS)
        async with aiohttp.ClientSession(timeout=limits) as session:
            asks = [ask(lab, session, name, stream=turn % 2 == 0) for turn in range(5) for name in names]
            return await asyncio.gather(*asks)

    seen = Counter(asyncio.run(flood()))
    print(dict(seen))
    assert seen["right"] >= len(names)
    lab.at_rest()


def test_a_request_that_waits_in_line_at_decode_beyond_its_lease_is_right_or_fails(lab: Lab) -> None:
    """Both decode servers are busy for longer than a lease when the tickets come."""
    before = lab.cluster.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total")

    async def go() -> Counter[str]:
        limits = aiohttp.ClientTimeout(total=START_SECONDS)
        async with aiohttp.ClientSession(timeout=limits) as session:

            async def occupy(server: Server) -> None:
                body = {"model": MODEL, "prompt": [50] * 20, "max_tokens": 480, "ignore_eos": True}
                async with session.post(f"{server.url}/v1/completions", json=body) as response:
                    assert response.status == 200, await response.read()

            busy = [asyncio.create_task(occupy(each)) for each in lab.cluster.decode for _ in range(8)]
            try:
                for each in lab.cluster.decode:
                    running = lambda each=each: each.metric("vllm:num_requests_running") >= 2  # type: ignore[misc] # noqa: E731
                    assert await asyncio.to_thread(eventually, running, True) is True
                names = list(lab.asked)[-8:]
                return Counter(await asyncio.gather(*(ask(lab, session, name, stream=False) for name in names)))
            finally:
                for each in busy:
                    each.cancel()
                await asyncio.gather(*busy, return_exceptions=True)

    seen = asyncio.run(go())
    expired = lab.cluster.prefill[0].metric("vllm:nixl_num_kv_expired_reqs_total") - before
    print(dict(seen), f"{expired:g} leases ran out")
    assert seen["right"] > 0
    lab.at_rest()


def test_leases_that_run_out_while_decode_stands_still_bring_no_garbage(lab: Lab) -> None:
    """For longer than a lease, and too short for probes to see it: the requests go on with what they were given."""
    prefill = lab.cluster.prefill[0]
    before = prefill.metric("vllm:nixl_num_kv_expired_reqs_total")

    def disturb() -> None:
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for each in lab.cluster.decode:
                    stack.enter_context(standing_still(each))
                time.sleep(LEASE_SECONDS + 1.0)  # what is tested
            time.sleep(1.0)  # for new requests to be under way

    under_load(lab, disturb, seed=4)
    print(f"{prefill.metric('vllm:nixl_num_kv_expired_reqs_total') - before:g} leases ran out")
    lab.at_rest()


def test_a_decode_server_that_stands_still_is_left_and_its_requests_go_to_the_other(lab: Lab) -> None:
    def disturb() -> None:
        good = lab.cluster.proxy.metric("baton_requests_total", status="200")
        with standing_still(lab.cluster.decode[0]):
            assert eventually(lambda: lab.state("D0"), "out") == "out"

            def served() -> bool:
                return lab.cluster.proxy.metric("baton_requests_total", status="200") > good + 4 * CLIENTS

            assert eventually(served, True) is True
        assert eventually(lambda: lab.state("D0"), "usable") == "usable"

    under_load(lab, disturb, seed=1)
    lab.at_rest()


def test_a_prefill_server_that_stands_still_holds_its_requests_up_and_spoils_none(lab: Lab) -> None:
    def disturb() -> None:
        with standing_still(lab.cluster.prefill[0]):
            assert eventually(lambda: lab.state("P0"), "out") == "out"
            time.sleep(2 * LEASE_SECONDS)  # what is tested: every lease runs out in its sleep
        assert eventually(lambda: lab.state("P0"), "usable") == "usable"

    under_load(lab, disturb, seed=2)
    lab.at_rest()


@pytest.mark.long  # test_restarts.py kills one of each by default
@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_that_is_killed_under_load_comes_back_and_nothing_is_wrong(lab: Lab, role: str) -> None:
    servers: Any = lab.cluster.decode if role == "decode" else lab.cluster.prefill
    name = "D0" if role == "decode" else "P0"

    def disturb() -> None:
        kill(servers[0])
        assert eventually(lambda: lab.state(name) != "usable", True) is True
        servers[0] = again(servers[0], lab.logs, lab.started)
        assert eventually(lambda: lab.state(name), "usable") == "usable"

    under_load(lab, disturb, seed=3)
    lab.at_rest()
