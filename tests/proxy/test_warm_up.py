"""Every pair hands over once before the proxy says that it is ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Role
from baton.http import Request
from baton.proxy import OnNoTransfer, Proxy, ProxySettings, warm_up
from baton.proxy.breaker import BreakerRules
from baton.proxy.warm_up import WarmUp, key, pairs
from tests.proxy.fakes import FakeEngine, House, decode_answer, hang, prefill_answer, until, with_house
from tests.proxy.test_fleet import fleet
from tests.proxy.test_health import fail


async def healthy(house: House, seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while (await house.get("/health"))[0] != 200:
            await asyncio.sleep(0.01)


async def failures(house: House) -> float:
    _, text = await house.get("/metrics")
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("baton_warm_up_failures_total"))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (2, 3), (3, 1), (1, 4), (5, 2)])
def test_pairs_are_all_pairs_once(prefill: int, decode: int) -> None:
    made = [key(pair) for pair in pairs(fleet(prefill, decode))]
    assert sorted(made) == sorted((f"P{p}", f"D{d}") for p in range(prefill) for d in range(decode))


def test_every_pair_hands_over_exactly_once() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        assert [len(each.bodies) for each in house.prefill] == [3, 3]
        assert [len(each.bodies) for each in house.decode] == [2, 2, 2]
        assert len(house.ledger.pulled) == 6
        assert house.ledger.held == set()
        assert some(json.loads((await house.get("/health"))[1])["warm_up"]) == {"pairs": 6, "tried": 6}
        # and no more later on
        house.proxy._warm_up.look()  # type: ignore[union-attr]
        await asyncio.sleep(0.1)
        assert sum(len(each.bodies) for each in house.prefill) == 6
        assert await failures(house) == 0

    with_house(test, prefill=2, decode=3, warm_up=True)


def test_the_legs_are_those_of_a_small_request_with_prompts_that_no_cache_holds() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        prefill, decode = house.prefill[0], house.decode
        prompts = [body["prompt"] for body in prefill.bodies]
        assert len(set(prompts)) == 2
        assert all(len(prompt) == 32 for prompt in prompts)
        for body in prefill.bodies:
            assert (body["model"], body["max_tokens"], body["stream"]) == ("m", 1, False)
            assert body["kv_transfer_params"]["do_remote_decode"] is True
        for each in decode:
            assert (each.bodies[0]["model"], each.bodies[0]["max_tokens"]) == ("m", 1)
            assert each.bodies[0]["kv_transfer_params"]["do_remote_prefill"] is True

    with_house(test, decode=2, warm_up=True)


def test_engines_are_given_their_key() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        for engine in (*house.prefill, *house.decode):
            assert [each["authorization"] for each in engine.headers] == ["Bearer engines"] * len(engine.headers)

    with_house(test, warm_up=True, engine_api_key="engines", api_keys=("clients",))


def test_each_engine_has_one_at_a_time_and_others_go_on_meanwhile() -> None:
    running: dict[str, int] = {}
    most = {"one engine": 0, "all": 0}

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        name = str(id(engine))
        running[name] = running.get(name, 0) + 1
        most["one engine"] = max(most["one engine"], running[name])
        most["all"] = max(most["all"], sum(running.values()))
        await asyncio.sleep(0.05)
        running[name] -= 1
        answer = prefill_answer if engine.role is Role.PREFILL else decode_answer
        return await answer(engine, request, body)

    async def test(house: House) -> None:
        for engine in (*house.prefill, *house.decode):
            engine.answer = slow
        await warm(house)
        assert most == {"one engine": 1, "all": 2}

    with_house(test, prefill=2, decode=2)


@contextlib.asynccontextmanager
async def warming(house: House, **more: Any) -> AsyncIterator[tuple[Proxy, WarmUp]]:
    """Another proxy over the engines of *house*, and its warm-up, which has begun."""
    own = {"host": "127.0.0.1", "port": 0, "warm_up": True, "probe_interval_seconds": 0.05}
    own["on_no_transfer"] = OnNoTransfer.WARN
    proxy = Proxy(ProxySettings(endpoints=house.proxy.settings.endpoints, **{**own, **more}))
    await proxy.start()
    try:
        assert isinstance(proxy._warm_up, WarmUp)
        yield proxy, proxy._warm_up
    finally:
        await proxy.stop(0.0)


async def warm(house: House, **more: Any) -> Proxy:
    """The same, once its first round is over; stopped."""
    async with warming(house, **more) as (proxy, state), asyncio.timeout(30.0):
        while not await state.ready() or state._running:
            await asyncio.sleep(0.005)
    return proxy


def gated(gate: asyncio.Event) -> Any:
    """Decode servers' answer that keeps warm-ups waiting, and nobody else."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["prompt"] != "a client's":
            await gate.wait()
        return await decode_answer(engine, request, body)

    return answer


def test_health_is_good_only_when_all_pairs_were_tried() -> None:
    async def test(house: House) -> None:
        gate = asyncio.Event()
        house.decode[1].answer = gated(gate)
        async with warming(house) as (proxy, state):
            await until(lambda: some(state.counts()) == {"pairs": 2, "tried": 1})
            assert await health(proxy) == (503, {"status": "warming up", "warm_up": {"pairs": 2, "tried": 1}})
            gate.set()
            await until(lambda: some(state.counts()) == {"pairs": 2, "tried": 2})
            assert await health(proxy) == (200, {"status": "ok", "warm_up": {"pairs": 2, "tried": 2}})

    with_house(test, decode=2)


def test_clients_are_answered_while_it_warms_up_and_a_restart_does_not_take_the_proxy_out() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        gate = asyncio.Event()
        house.decode[0].answer = gated(gate)
        await restart(house, house.decode[0])
        await until(lambda: len(house.decode[0].bodies) == 2)
        assert (await house.get("/health"))[0] == 200
        async with house.post({"prompt": "a client's"}) as response:
            assert response.status == 200
        gate.set()

    with_house(test, warm_up=True)


async def health(proxy: Proxy) -> tuple[int, dict[str, Any]]:
    """Status and body of /health, less the counts by role."""
    request = Request("GET", b"/health", [], http_1_0=False, keep_alive=True)
    answer = await proxy._answer(request)
    body = json.loads(answer.body)
    return answer.status, {"status": body["status"], "warm_up": some(body["warm_up"])}


def some(counts: dict[str, int]) -> dict[str, int]:
    """How many pairs there are, and how many were tried."""
    return {name: counts[name] for name in ("pairs", "tried")}


async def restart(house: House, engine: FakeEngine) -> None:
    """Take an engine away until the proxy has seen it, and bring it back on the same port."""
    await healthy(house)
    assert engine.server is not None
    port = engine.endpoint.port
    (instance,) = [each for each in house.proxy.fleet if each.endpoint.port == port]
    starts = instance.came_up
    await engine.server.close()
    await house.proxy.way.upstream.probe(house.proxy.fleet)
    assert not instance.usable
    await engine.start_on(port)
    await until(lambda: instance.came_up > starts)


def test_an_engine_that_comes_back_is_warmed_up_again_with_all_its_pairs() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        engines = (*house.prefill, *house.decode)
        assert [len(each.bodies) for each in engines] == [2, 2, 2, 2]
        await restart(house, house.prefill[1])
        await until(lambda: len(house.ledger.pulled) == 6)
        assert [len(each.bodies) for each in engines] == [2, 4, 3, 3]

    with_house(test, prefill=2, decode=2, warm_up=True)


def test_an_engine_that_is_not_up_yet_is_waited_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(house: House) -> None:
        assert house.decode[1].server is not None
        await house.decode[1].server.close()
        async with warming(house) as (_, state):
            await until(lambda: some(state.counts()) == {"pairs": 2, "tried": 1})
            await until(lambda: not state._running)
            monkeypatch.setattr(warm_up, "STRAGGLER_SECONDS", 1000.0)
            assert await state.ready() is False
            monkeypatch.setattr(warm_up, "STRAGGLER_SECONDS", 0.0)
            assert await state.ready() is True

    with_house(test, decode=2)


def test_an_engine_that_comes_up_late_is_in_the_first_round() -> None:
    async def test(house: House) -> None:
        late = house.decode[1]
        assert late.server is not None
        port = late.endpoint.port
        await late.server.close()
        async with warming(house) as (_, state):
            await until(lambda: some(state.counts()) == {"pairs": 2, "tried": 1})
            assert await state.ready() is False
            await late.start_on(port)
            await until(lambda: some(state.counts()) == {"pairs": 2, "tried": 2})
            assert await state.ready() is True
            assert len(late.bodies) == 1

    with_house(test, decode=2)


def refuses(status: int, text: str) -> Any:
    async def answer(*_: Any) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=status)

    return answer


async def no_ticket(*_: Any) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": None})


async def breaks(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def generation_failed(*_: Any) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "", "finish_reason": "error"}]})


@pytest.mark.parametrize(
    ("place", "answer", "said"),
    [
        ("D", refuses(500, "no handshake"), "warm-up of P0 to D0 failed: D0 answered 500: .*no handshake"),
        ("D", refuses(401, "who"), "D0 answered 401: it asks for a key, see --engine-api-key"),
        ("D", generation_failed, "D0 answered 200: .*finish_reason"),
        ("D", breaks, "the decode server broke off its answer"),
        ("D", hang, "warm-up of P0 to D0 failed: not done after 3 s"),
        ("P", hang, "warm-up of P0 to D0 failed: not done after 3 s"),
        ("P", no_ticket, "P0 gave no ticket"),
        ("P", refuses(400, "no"), "P0 answered 400"),
    ],
)
def test_a_pair_that_fails_is_said_and_counted_and_blocks_nobody(
    place: str, answer: Any, said: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warm_up, "RETRY_SECONDS", 1000.0)

    async def test(house: House) -> None:
        (house.prefill if place == "P" else house.decode)[0].answer = answer
        proxy = await warm(house, warm_up_seconds=3.0)
        assert proxy.way.metrics.warm_up_failures.family().samples[0].value == (1 if place == "D" else 2)

    with_house(test, decode=2)
    assert [each for each in caplog.messages if re.search(said, each)]
    assert any("warmed up: 2 pairs in" in each for each in caplog.messages)


def test_a_pair_that_fails_is_tried_again_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a handshake can take longer than vLLM waits: better this request fails than a client's."""
    monkeypatch.setattr(warm_up, "RETRY_SECONDS", 0.01)

    async def fails_twice(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await (refuses(500, "busy") if len(engine.bodies) < 3 else decode_answer)(engine, request, body)

    async def test(house: House) -> None:
        house.decode[0].answer = fails_twice
        async with warming(house) as (proxy, state):
            await until(lambda: len(house.decode[0].bodies) == 3 and not state._running)
            await asyncio.sleep(0.3)
            assert len(house.decode[0].bodies) == 3
            assert proxy.way.metrics.warm_up_failures.family().samples[0].value == 2

    with_house(test)


def test_a_pair_that_never_works_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "RETRY_SECONDS", 0.001)

    async def test(house: House) -> None:
        house.decode[0].answer = refuses(500, "never")
        async with warming(house) as (_, state):
            await until(lambda: len(house.decode[0].bodies) == warm_up.TRIES and not state._running)
            await asyncio.sleep(0.5)
            assert len(house.decode[0].bodies) == warm_up.TRIES

    with_house(test)


def test_an_engine_that_names_no_model_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: Any) -> None:
    async def nothing(self: FakeEngine, request: web.Request) -> web.Response:
        return web.json_response({"data": []})

    monkeypatch.setattr(FakeEngine, "_models", nothing)

    async def test(house: House) -> None:
        await warm(house)

    with_house(test)
    assert "warm-up of P0 to D0 failed: P0 names no model at /v1/models" in caplog.messages


def test_a_hand_off_that_is_cut_off_still_reaches_its_decode_server() -> None:
    """With the ticket in its hands the decode server frees the blocks; nobody else can."""

    async def test(house: House) -> None:
        house.decode[0].answer = hang
        await warm(house, warm_up_seconds=1.0)
        await until(lambda: house.decode[0].gone == 1)
        assert house.ledger.held == set()

    with_house(test)


def test_a_stop_during_the_warm_up_is_quick() -> None:
    async def test(house: House) -> None:
        house.decode[0].answer = hang
        async with warming(house) as (proxy, _):
            await until(lambda: len(house.decode[0].bodies) == 1)
            async with asyncio.timeout(5.0):
                await proxy.stop(30.0)
            await until(lambda: house.decode[0].gone == 1)

    with_house(test)


def test_a_slow_pair_has_a_line_of_its_own(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warm_up, "SLOW_SECONDS", 0.0)

    async def test(house: House) -> None:
        await warm(house)

    with_house(test)
    said = [each for each in caplog.messages if "warm" in each]
    assert said[0] == "warming up: one small hand-off for each new pair"
    assert said[1].startswith("warm-up of P0 to D0 took ")
    assert said[2].startswith("warmed up: 1 pairs in ")


@pytest.mark.parametrize("broken", ["breaker", "hand_offs"])
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_what_is_half_open_is_well_again_by_a_hand_off_where_no_request_comes(role: Role, broken: str) -> None:
    """Whoever waits until all are ready sends none."""

    async def test(house: House) -> None:
        await healthy(house)
        assert house.proxy.fleet.pools[role][0].usable
        (instance,) = house.proxy.fleet.pools[role]
        asked = len(house.decode[0].bodies)
        getattr(instance, broken).trip(time.monotonic(), "500")
        house.proxy.fleet.on_change()
        instance._settle("it is tripped")
        assert not instance.usable
        await until(lambda: instance.usable)
        assert len(house.decode[0].bodies) == asked + 2

    with_house(test, warm_up=True, breaker=BreakerRules(successes=2, open_seconds=0.05), probe_interval_seconds=0.02)


def test_what_is_half_open_and_fails_its_hand_off_is_out_again() -> None:
    async def test(house: House) -> None:
        await healthy(house)
        (decode,) = house.proxy.fleet.pools[Role.DECODE]
        house.decode[0].answer = fail
        decode.hand_offs.trip(time.monotonic(), "500")
        decode._settle("it is tripped")
        asked = len(house.decode[0].bodies)
        await until(lambda: len(house.decode[0].bodies) > asked + 1)
        assert not decode.usable
        house.decode[0].answer = None
        await until(lambda: decode.usable)

    with_house(test, warm_up=True, breaker=BreakerRules(successes=1, open_seconds=0.05), probe_interval_seconds=0.02)
