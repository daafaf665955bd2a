"""A fleet that looks disaggregated and isn't: start-up, requests, and what readiness and metrics say of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Role
from baton.proxy import OnNoTransfer, proof, transfers, warm_up
from tests.proxy.fakes import (
    FakeEngine,
    Handler,
    House,
    house,
    prefill_answer,
    until,
)

ABOUT = {
    "engine_id": "p",
    "transfer_mode": "pull",
    "side_channel_host": "127.0.0.1",
    "side_channel_port": 5600,
    "tp_size": 1,
    "block_size": 32,
    "compatibility": {"model": "m", "dtype": "float32"},
}


def counting(engine: FakeEngine, moves: bool = True) -> Callable[[], str]:
    """The counters of a decode server whose every request brings a transfer, or none does."""

    def made() -> str:
        count = len([body for body in engine.bodies if body.get("kv_transfer_params")]) if moves else 0
        return f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {count * 1024}\nbaton_kv_loads_total {count}\n'

    return made


def refuse(status: int) -> Handler:
    async def answer(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such thing"}}, status=status)

    return answer


async def no_ticket(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": None})


def usage(cached: int) -> Handler:
    async def answer(_: FakeEngine, __: web.Request, ___: dict[str, Any]) -> web.StreamResponse:
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        return web.json_response({"choices": [{"text": "x"}], "usage": details})

    return answer


@contextlib.asynccontextmanager
async def readying(
    prepare: Callable[[FakeEngine, FakeEngine], None], **settings: Any
) -> AsyncIterator[tuple[House, dict[str, Any]]]:
    """A house of one pair, and what readiness says of it when the pair was tried."""

    def both(engines: list[FakeEngine]) -> None:
        for each in engines:
            each.metrics = counting(each)
        prepare(engines[0], engines[1])

    given = {"warm_up": True, "probe_interval_seconds": 0.05, "warm_up_seconds": 5.0, **settings}
    async with house(prepare=both, **given) as made:
        said: dict[str, Any] = {}

        async def tried() -> bool:
            nonlocal said
            said = json.loads((await made.get("/readiness"))[1])
            return bool(said["warm_up"]["tried"])

        async with asyncio.timeout(20.0):
            while not await tried():
                await asyncio.sleep(0.01)
        yield made, said


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "COUNT_SECONDS", 0.2)
    monkeypatch.setattr(proof, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(warm_up, "RETRY_SECONDS", 0.05)


def no_connector(prefill: FakeEngine, _: FakeEngine) -> None:
    prefill.answer, prefill.about = no_ticket, {"transfer_mode": None}


def stock_without_connector(prefill: FakeEngine, _: FakeEngine) -> None:
    prefill.answer = no_ticket


def params_dropped(prefill: FakeEngine, _: FakeEngine) -> None:
    prefill.answer, prefill.about = no_ticket, {**ABOUT, "role": "kv_producer"}


def decode_without_connector(_: FakeEngine, decode: FakeEngine) -> None:
    decode.about = {"transfer_mode": None}


def prefill_refuses(prefill: FakeEngine, _: FakeEngine) -> None:
    prefill.answer = refuse(400)


def wrong_endpoint(prefill: FakeEngine, _: FakeEngine) -> None:
    prefill.answer = refuse(404)


def decode_fails(_: FakeEngine, decode: FakeEngine) -> None:
    decode.answer = refuse(500)


def decode_computes(_: FakeEngine, decode: FakeEngine) -> None:
    decode.metrics = counting(decode, moves=False)


def decode_says_so(_: FakeEngine, decode: FakeEngine) -> None:
    decode.metrics, decode.answer = None, usage(0)


def incompatible(prefill: FakeEngine, decode: FakeEngine) -> None:
    prefill.about = {**ABOUT, "role": "kv_producer"}
    decode.about = {**ABOUT, "role": "kv_consumer", "compatibility": {"model": "m", "dtype": "bfloat16"}}


def swapped(prefill: FakeEngine, decode: FakeEngine) -> None:
    prefill.about, decode.about = {**ABOUT, "role": "kv_consumer"}, {**ABOUT, "role": "kv_producer"}


BROKEN = {
    no_connector: ("no_connector", "P0 has no KV connector"),
    stock_without_connector: ("no_connector", "P0 gave no ticket: is it started as a prefill server"),
    params_dropped: ("params_dropped", "P0 gave no ticket though it has a KV connector"),
    decode_without_connector: ("no_connector", "D0 has no KV connector"),
    prefill_refuses: ("prefill_refused", "P0 answered 400"),
    wrong_endpoint: ("wrong_endpoint", "P0 answered 404: is that an engine's address?"),
    decode_fails: ("decode_refused", "D0 answered 500"),
    decode_computes: ("decode_computed", "D0 moved no KV cache"),
    decode_says_so: ("decode_computed", "D0 computed the prompt itself"),
    incompatible: ("incompatible", "dtype: P0 float32, D0 bfloat16"),
    swapped: ("wrong_role", "P0 is named as a prefill server and was started as another (kv_role kv_consumer)"),
}


@pytest.mark.parametrize("prepare", list(BROKEN), ids=lambda each: each.__name__)
def test_a_pair_that_transfers_nothing_is_not_ready_and_says_why(prepare: Any) -> None:
    cause, said = BROKEN[prepare]

    async def go() -> None:
        async with readying(prepare) as (made, body):
            for path in ("/health", "/readiness"):
                assert (await made.get(path))[0] == 503
            assert (await made.get("/liveness"))[0] == 200
            assert body["status"] == "not proven"
            assert body["warm_up"]["failed"] == 1
            (reason,) = body["reasons"]
            assert (reason["cause"], reason["instances"]) == (cause, ["P0", "D0"])
            assert said in reason["message"]

    asyncio.run(go())


@pytest.mark.parametrize("policy", [OnNoTransfer.WARN, OnNoTransfer.FALLBACK])
def test_warn_and_fallback_are_ready_with_the_reason(policy: OnNoTransfer) -> None:
    async def go() -> None:
        async with readying(decode_computes, on_no_transfer=policy) as (made, _):
            code, raw = await made.get("/readiness")
            assert code == 200
            assert [each["cause"] for each in json.loads(raw)["reasons"]] == ["decode_computed"]

    asyncio.run(go())


def test_a_pair_is_ready_as_soon_as_it_is_mended() -> None:
    async def go() -> None:
        async with readying(decode_computes) as (made, _):
            made.decode[0].metrics = counting(made.decode[0])
            async with asyncio.timeout(20.0):
                while (await made.get("/readiness"))[0] != 200:
                    await asyncio.sleep(0.02)
            said = json.loads((await made.get("/readiness"))[1])
            assert said["reasons"] == []
            assert said["warm_up"] == {"pairs": 1, "tried": 1, "proven": 1, "unproven": 0, "failed": 0}

    asyncio.run(go())


def nothing_counted(_: FakeEngine, decode: FakeEngine) -> None:
    decode.metrics = None


@pytest.mark.parametrize(("policy", "code"), [(None, 200), (OnNoTransfer.WARN, 200), (OnNoTransfer.FAIL, 503)])
def test_where_nobody_counts_it_is_unproven(policy: OnNoTransfer | None, code: int) -> None:
    """Stock engines without metrics: only who insists on a proof is not served."""

    async def go() -> None:
        async with readying(nothing_counted, on_no_transfer=policy) as (made, body):
            assert body["warm_up"]["unproven"] == 1
            assert (await made.get("/readiness"))[0] == code

    asyncio.run(go())


def test_a_stock_engine_that_says_how_much_was_cached_is_proven_by_it() -> None:
    def prepare(_: FakeEngine, decode: FakeEngine) -> None:
        decode.metrics, decode.answer = None, usage(15)

    async def go() -> None:
        async with readying(prepare, on_no_transfer=OnNoTransfer.FAIL) as (made, body):
            assert body["warm_up"]["proven"] == 1
            assert (await made.get("/readiness"))[0] == 200

    asyncio.run(go())


def test_in_write_mode_the_prefill_servers_counters_count() -> None:
    def prepare(prefill: FakeEngine, decode: FakeEngine) -> None:
        prefill.about, decode.about = ({**ABOUT, "transfer_mode": "push"} for _ in range(2))
        decode.metrics = counting(decode, moves=False)

    async def go() -> None:
        async with readying(prepare) as (_, body):
            assert body["warm_up"]["proven"] == 1

    asyncio.run(go())


def test_an_address_where_nobody_is_is_named() -> None:
    async def go() -> None:
        async with house(warm_up=True) as made:
            server, url = made.prefill[0].server, made.prefill[0].endpoint.url
            assert server is not None
            await server.close()
            await made.proxy.way.upstream.probe(made.proxy.fleet)
            code, raw = await made.get("/readiness")
            assert code == 503
            (reason,) = json.loads(raw)["reasons"]
            assert (reason["cause"], reason["instances"]) == ("wrong_endpoint", ["P0"])
            assert url in reason["message"]

    asyncio.run(go())


# requests


async def counted(made: House, name: str, **labels: str) -> float:
    said = ",".join(f'{key}="{value}"' for key, value in labels.items())
    wanted = f"{name}{{{said}}} " if said else f"{name} "
    _, text = await made.get("/metrics")
    return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(wanted)), 0.0)


@pytest.mark.parametrize(
    ("policy", "code"),
    [(None, 200), (OnNoTransfer.WARN, 200), (OnNoTransfer.FALLBACK, 200), (OnNoTransfer.FAIL, 503)],
)
def test_a_request_without_a_ticket_is_counted_and_only_refused_by_fail(policy: OnNoTransfer | None, code: int) -> None:
    async def go() -> None:
        async with house(on_no_transfer=policy) as made:
            made.prefill[0].answer = no_ticket
            async with made.post({"prompt": "x"}) as response:
                assert response.status == code
                assert ("retry-after" in response.headers) == (code == 503)
            assert len(made.decode[0].bodies) == (code == 200)
            assert await counted(made, "baton_no_transfer_total", cause="no_ticket") == 1
            assert await counted(made, "baton_transfer_expected_total") == 1
            assert await counted(made, "baton_prefill_without_ticket_total") == 1

    asyncio.run(go())


async def dies(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("how", ["no server", "dies"])
@pytest.mark.parametrize(("policy", "code"), [(None, 503), (OnNoTransfer.FAIL, 503), (OnNoTransfer.FALLBACK, 200)])
def test_without_a_prefill_server_only_fallback_answers(how: str, policy: OnNoTransfer | None, code: int) -> None:
    async def go() -> None:
        async with house(on_no_transfer=policy) as made:
            if how == "dies":
                made.prefill[0].answer = dies
            else:
                assert made.prefill[0].server is not None
                await made.prefill[0].server.close()
            async with made.post({"prompt": "x", "max_tokens": 7}) as response:
                assert response.status == (502 if how == "dies" and code == 503 else code)
            if code == 200:
                (body,) = made.decode[0].bodies
                assert body["max_tokens"] == 7
                assert body.get("kv_transfer_params") is None
                assert await counted(made, "baton_no_transfer_total", cause="no_prefill") == 1

    asyncio.run(go())


async def all_alone(_: FakeEngine, __: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A decode server that was handed nothing: it has the logits of the prompt and answers for it."""
    choice: dict[str, Any] = {"text": (body["prompt"] if body.get("echo") else "") + "one"}
    if body.get("logprobs"):
        choice["logprobs"] = {"tokens": ["hello ", "one"] if body.get("echo") else ["one"]}
    if body.get("prompt_logprobs") is not None:
        choice["prompt_logprobs"] = [None, {"1": {"logprob": -1.0}}]
    return web.json_response({"choices": [choice]})


@pytest.mark.parametrize("way", ["gone", "fails"])
@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ({"prompt_logprobs": 1}, {"text": "one", "prompt_logprobs": [None, {"1": {"logprob": -1.0}}]}),
        ({"echo": True, "logprobs": 1}, {"text": "hello one", "logprobs": {"tokens": ["hello ", "one"]}}),
    ],
)
def test_a_decode_server_that_is_alone_answers_for_the_prompt_too(
    way: str, asked: dict[str, Any], answered: dict[str, Any]
) -> None:
    async def go() -> None:
        async with house(on_no_transfer=OnNoTransfer.FALLBACK) as made:
            await no_prefill(made, way)
            made.decode[0].answer = all_alone
            async with made.post({"prompt": "hello ", **asked}) as response:
                assert (response.status, await response.json()) == (200, {"choices": [answered]})
            assert made.decode[0].bodies == [{"prompt": "hello ", **asked}]

    asyncio.run(go())


async def no_prefill(made: House, way: str) -> None:
    """No prefill server can be had: known before anything is sent, or found out by the prefill leg."""
    if way == "gone":
        made.proxy.fleet.pools[Role.PREFILL][0].unreachable("nobody is there")
        assert made.prefill[0].server is not None
        await made.prefill[0].server.close()
    else:
        made.prefill[0].answer = dies


@pytest.mark.parametrize("way", ["gone", "fails"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("asked", "answers"), [({"prompt": "a", "n": 2}, 2), ({"prompt": ["a", "b"], "n": 2}, 4)])
def test_several_answers_fall_back_together(asked: dict[str, Any], answers: int, streamed: bool, way: str) -> None:
    async def go() -> None:
        async with house(on_no_transfer=OnNoTransfer.FALLBACK) as made:
            await no_prefill(made, way)
            async with asyncio.timeout(10.0), made.post({**asked, "stream": streamed}) as response:
                assert response.status == 200
                raw = await response.text()
            assert len(made.decode[0].bodies) == answers
            if streamed:
                assert raw.endswith("data: [DONE]\n\n")
            else:
                assert [each["index"] for each in json.loads(raw)["choices"]] == list(range(answers))
            await until(lambda: made.proxy.way.gate.active == 0)

    asyncio.run(go())


def test_a_clients_own_mistake_is_no_reason_to_fall_back() -> None:
    async def go() -> None:
        async with house(on_no_transfer=OnNoTransfer.FALLBACK) as made:
            made.prefill[0].answer = refuse(400)
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 400
            assert made.decode[0].bodies == []

    asyncio.run(go())


def test_what_begins_at_run_time_is_proven_anew_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SUSPECT_SECONDS", 0.0)

    async def go() -> None:
        async with readying(lambda *_: None) as (made, body):
            assert body["reasons"] == []
            made.prefill[0].answer = no_ticket
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 200
            async with asyncio.timeout(20.0):
                while (said := json.loads((await made.get("/readiness"))[1]))["warm_up"]["failed"] != 1:
                    await asyncio.sleep(0.02)
            # It is no reason to stop serving, unless that is asked for.
            assert (await made.get("/readiness"))[0] == 200
            assert {each["cause"] for each in said["reasons"]} == {"no_connector", "no_ticket"}
            monkeypatch.setattr(transfers, "REMEMBER_SECONDS", 0.0)
            made.prefill[0].answer = prefill_answer
            made.proxy.way.transfers.suspects.add("P0")
            async with asyncio.timeout(20.0):
                while json.loads((await made.get("/readiness"))[1])["reasons"]:
                    await asyncio.sleep(0.02)

    asyncio.run(go())


def test_a_pair_whose_hand_off_fails_is_proven_anew_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SUSPECT_SECONDS", 0.0)
    monkeypatch.setattr(warm_up, "TRIES", 1)

    async def go() -> None:
        async with readying(lambda *_: None, on_no_transfer=OnNoTransfer.FAIL) as (made, body):
            assert body["reasons"] == []
            made.decode[0].answer = refuse(500)
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 500
            async with asyncio.timeout(20.0):
                while (said := await made.get("/readiness"))[0] != 503:
                    await asyncio.sleep(0.02)
            (reason,) = json.loads(said[1])["reasons"]
            assert (reason["cause"], reason["instances"]) == ("decode_refused", ["P0", "D0"])
            # Nobody is sent to it any more, and all the same it finds out that it is well again.
            made.decode[0].answer = None
            async with asyncio.timeout(20.0):
                while (await made.get("/readiness"))[0] != 200:
                    await asyncio.sleep(0.02)

    asyncio.run(go())


def test_without_a_warm_up_requests_without_a_ticket_are_a_reason_all_the_same() -> None:
    async def go() -> None:
        async with house() as made:
            assert "reasons" not in json.loads((await made.get("/readiness"))[1])
            made.prefill[0].answer = no_ticket
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 200
            (reason,) = json.loads((await made.get("/readiness"))[1])["reasons"]
            assert (reason["cause"], reason["instances"]) == ("no_ticket", ["P0"])

    asyncio.run(go())


def test_with_fail_a_fleet_that_stops_transferring_is_not_ready_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "SUSPECT_SECONDS", 0.0)

    async def go() -> None:
        async with readying(lambda *_: None, on_no_transfer=OnNoTransfer.FAIL) as (made, _):
            assert (await made.get("/readiness"))[0] == 200
            made.prefill[0].answer = no_ticket
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 503
            async with asyncio.timeout(20.0):
                while (await made.get("/readiness"))[0] != 503:
                    await asyncio.sleep(0.02)

    asyncio.run(go())


def test_what_engines_move_is_a_metric() -> None:
    async def go() -> None:
        async with house(scrape_seconds=0.02) as made:
            made.decode[0].metrics = counting(made.decode[0])
            async with made.post({"prompt": "x"}) as response:
                assert response.status == 200
            await until(lambda: "D0" in made.proxy.way.transfers.engines)
            await until(lambda: made.proxy.way.transfers.engines["D0"].moved_bytes == 1024)
            assert await counted(made, "baton_transfer_bytes_total", instance="D0") == 1024

    asyncio.run(go())


def test_nothing_is_kept_of_what_is_removed() -> None:
    async def go() -> None:
        async with readying(lambda *_: None, scrape_seconds=0.02) as (made, _):
            counted_engines = made.proxy.way.transfers
            await until(lambda: set(counted_engines.engines) == {"P0", "D0"})
            warm: Any = made.proxy._warm_up
            assert set(warm._tried) == set(warm._found) == set(warm._proved_at) == {("P0", "D0")}
            async with made.client.delete(f"{made.url}/instances/D0") as response:
                assert response.status == 200
            await until(lambda: set(counted_engines.engines) == {"P0"})
            await until(lambda: not (warm._tried or warm._found or warm._proved_at or warm._again))

    asyncio.run(go())


def test_an_engine_that_counts_failures_is_proven_anew() -> None:
    failures = 0

    async def go() -> None:
        nonlocal failures
        async with house(scrape_seconds=0.02) as made:
            made.decode[0].metrics = lambda: f"vllm:nixl_num_failed_transfers_total {failures}\n"
            await until(lambda: "D0" in made.proxy.way.transfers.engines)
            assert made.proxy.way.transfers.suspects == set()
            failures = 1
            await until(lambda: made.proxy.way.transfers.suspects == {"D0"})

    asyncio.run(go())
