"""Write mode, over real sockets to fake engines that push: both legs at once, and neither left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Role, TransferMode
from tests.proxy.fakes import FakeEngine, House, hang, stream, until, with_house
from tests.proxy.push_fakes import PREFIXES, TOKENS, Pushing, about

TEXT = "".join(TOKENS)
P, D = Role.PREFILL, Role.DECODE


def pushing(test: Callable[[House, Pushing], Awaitable[None]], **options: Any) -> None:
    """Run *test* in a house of engines in write mode; in the end no leg is open and no exception was left unseen."""
    push = Pushing()
    unseen: list[dict[str, Any]] = []
    also = options.pop("prepare", lambda _: None)

    def prepare(engines: list[FakeEngine]) -> None:
        push.prepare(engines)
        also(engines)

    async def go(made: House) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        async with asyncio.timeout(30):
            await test(made, push)
        await until(lambda: all(instance.in_flight == 0 for instance in made.proxy.fleet))
        # what runs: this, the proxy, the fakes; no leg of a request
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert not {"prefill", "deliver_when_good"} & set(names)
        gc.collect()

    with_house(go, prepare=prepare, **options)
    assert unseen == []


async def ask(made: House, body: dict[str, Any] | None = None, **options: Any) -> tuple[int, bytes]:
    async with made.post(body or {"prompt": "a"}, **options) as response:
        return response.status, await response.read()


def asking(made: House, body: dict[str, Any] | None = None, **options: Any) -> asyncio.Task[tuple[int, bytes]]:
    return asyncio.ensure_future(ask(made, body, **options))


async def both_are_asked(made: House, times: int = 1) -> None:
    await until(lambda: all(len(each.bodies) == times for each in (made.prefill[0], made.decode[0])))


async def metric(made: House, name: str) -> float:
    _, text = await made.get("/metrics")
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


def text_of(raw: bytes) -> str:
    """The text of an answer, or of the events of a stream."""
    if raw.startswith(b"{"):
        return str(json.loads(raw)["choices"][0]["text"])
    events = [line[6:] for line in raw.decode().split("\n\n") if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in json.loads(event).get("choices", ()))


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [*PREFIXES, "/v1/responses"])
def test_both_legs_go_out_at_once_and_meet(path: str, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 9, "stream": streamed}
        reply = asking(made, body, path=path)
        await both_are_asked(made)
        push.free[P].set()
        status, raw = await reply
        assert (status, text_of(raw)) == (200, TEXT)
        assert len(push.fabric.pushed) == 1 and push.fabric.clean
        assert made.prefill[0].headers[0]["x-request-id"] == made.decode[0].headers[0]["x-request-id"]
        assert made.decode[0].bodies[0]["max_tokens"] == 9
        assert made.decode[0].bodies[0]["kv_transfer_params"] == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "e0",
            "remote_request_id": made.decode[0].headers[0]["x-request-id"],
            "keep_blocks": False,
            "remote_host": "127.0.0.1",
            "remote_port": 5559,
            "tp_size": 1,
            "pp_size": 1,
            "transfer_mode": "push",
        }
        assert made.prefill[0].bodies[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert await metric(made, "baton_handed_off_total") == 1
        assert await metric(made, "baton_prefill_without_ticket_total") == 0

    pushing(test)


@pytest.mark.parametrize("own", [{}, {"request_id": "resp_mine"}])
def test_both_legs_of_responses_carry_one_id_that_nobody_can_guess_in_their_bodies(own: dict[str, Any]) -> None:
    async def test(made: House, push: Pushing) -> None:
        for _ in range(2):
            status, _ = await ask(made, {"input": "a", "max_output_tokens": 9, **own}, path="/v1/responses")
            assert status == 200
        ids = [body["request_id"] for engine in (*made.prefill, *made.decode) for body in engine.bodies]
        assert ids[:2] == ids[2:]
        assert len(set(ids)) == 2
        assert all(len(each) == len("resp_") + 32 for each in ids)
        assert all(raw.count(b"request_id") == 2 for raw in made.decode[0].raws)  # its own and the ticket's
        assert made.decode[0].bodies[0]["max_output_tokens"] == 9

    pushing(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_decode_leg_that_comes_first_waits_for_the_push(streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        reply = asking(made, {"prompt": "a", "stream": streamed})
        await until(lambda: len(push.fabric.registered) == 1)
        push.free[P].set()
        assert text_of((await reply)[1]) == TEXT

    pushing(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_prefill_leg_that_is_done_first_waits_for_the_decode_server(streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[D].clear()
        reply = asking(made, {"prompt": "a", "stream": streamed})
        await until(lambda: push.fabric.finished.total() == 1)
        push.free[D].set()
        assert text_of((await reply)[1]) == TEXT
        assert push.fabric.clean

    pushing(test)


def test_the_clients_head_waits_for_prefill_though_the_decode_servers_is_here() -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        opening = asyncio.ensure_future(made.post({"prompt": "a", "stream": True}).__aenter__())
        await until(lambda: len(push.fabric.registered) == 1)
        await asyncio.sleep(0.05)
        assert not opening.done()
        push.free[P].set()
        response = await opening
        assert text_of(await response.read()) == TEXT

    pushing(test)


def test_a_decode_server_that_has_the_prompt_in_its_cache_does_not_overtake_prefill() -> None:
    async def test(made: House, push: Pushing) -> None:
        async def cached(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            usage = {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 5}}
            return web.json_response({"choices": [{"text": TEXT}], "usage": usage})

        made.decode[0].answer = cached
        push.free[P].clear()
        reply = asking(made)
        await both_are_asked(made)
        await asyncio.sleep(0.05)
        assert not reply.done()
        push.free[P].set()
        status, raw = await reply
        assert status == 200
        assert json.loads(raw)["usage"]["prompt_tokens_details"]["cached_tokens"] == 2

    pushing(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_cached_tokens_are_prefills(streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        _, raw = await ask(made, {"prompt": "a", "stream": streamed})
        assert raw.count(b'"cached_tokens":2') == 1
        assert b'"cached_tokens": 5' not in raw and b'"cached_tokens":5' not in raw

    pushing(test)


def test_scores_of_the_prompt_are_prefills() -> None:
    async def test(made: House, push: Pushing) -> None:
        _, raw = await ask(made, {"prompt": "a", "prompt_logprobs": 1})
        assert json.loads(raw)["choices"][0]["prompt_logprobs"] == [None, {"7": {"logprob": -1.0}}]
        assert "prompt_logprobs" not in made.decode[0].bodies[0]

    pushing(test)


async def drop(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Breaks the connection."""
    assert request.transport is not None
    request.transport.abort()
    return await hang()


def refusing(status: int) -> Any:
    async def refuse(*_: Any) -> web.StreamResponse:
        return web.Response(status=status, body=b'{"error": "own words"}', content_type="application/json")

    return refuse


FAILURES = [
    pytest.param(refusing(400), 400, b'{"error": "own words"}', id="400"),
    pytest.param(refusing(500), 500, b'{"error": "own words"}', id="500"),
    pytest.param(drop, 502, b"broke off its answer", id="broken"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("failure", "status", "said"), FAILURES)
@pytest.mark.parametrize("other", ["unanswered", "waiting"])
def test_a_prefill_leg_that_fails_closes_the_decode_leg(
    failure: Any, status: int, said: bytes, other: str, streamed: bool
) -> None:
    async def test(made: House, push: Pushing) -> None:
        fail = asyncio.Event()

        async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await fail.wait()
            answered: web.StreamResponse = await failure(engine, request, body)
            return answered

        made.prefill[0].answer = late
        if other == "unanswered":
            made.decode[0].answer = hang
        reply = asking(made, {"prompt": "a", "stream": streamed})
        await both_are_asked(made)
        if other == "waiting":
            await until(lambda: len(push.fabric.registered) == 1)
        fail.set()
        got, raw = await reply
        assert got == status
        assert said in raw
        await until(lambda: made.decode[0].gone == 1)
        assert push.fabric.clean
        assert await metric(made, "baton_handed_off_total") == 0

    pushing(test)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("failure", "status", "said"), FAILURES)
def test_a_decode_leg_that_fails_closes_the_prefill_leg(failure: Any, status: int, said: bytes, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        made.decode[0].answer = failure
        got, raw = await ask(made, {"prompt": "a", "stream": streamed})
        assert got == status
        assert said in raw
        await until(lambda: made.prefill[0].gone == 1)

    pushing(test)


def test_a_decode_stream_that_breaks_after_its_head_closes_the_prefill_leg() -> None:
    async def test(made: House, push: Pushing) -> None:
        async def begin(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await stream(request, [])
            await asyncio.sleep(0.05)
            return await drop(engine, request, body)

        push.free[P].clear()
        made.decode[0].answer = begin
        status, raw = await ask(made, {"prompt": "a", "stream": True})
        assert status == 502
        assert b"the decode server broke off its answer" in raw
        await until(lambda: made.prefill[0].gone == 1)

    pushing(test)


@pytest.mark.parametrize(("failure", "status", "said"), FAILURES)
def test_a_decode_leg_that_fails_when_prefill_is_done_is_the_clients_answer(
    failure: Any, status: int, said: bytes
) -> None:
    async def test(made: House, push: Pushing) -> None:
        async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await until(lambda: push.fabric.finished.total() == 1)
            await asyncio.sleep(0.05)
            answered: web.StreamResponse = await failure(engine, request, body)
            return answered

        made.decode[0].answer = late
        got, raw = await ask(made)
        assert got == status
        assert said in raw

    pushing(test)


@pytest.mark.parametrize("slow", [P, D])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_leg_that_takes_too_long_closes_the_other(slow: Role, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[slow].clear()
        status, raw = await ask(made, {"prompt": "a", "stream": streamed})
        assert status == 504
        # a decode server that waits for a slow prefill is as late
        assert b"server took too long" in raw
        await until(lambda: made.prefill[0].gone + made.decode[0].gone == (2 if slow is P else 1))

    pushing(test, request_timeout_seconds=0.3)


@pytest.mark.parametrize("unreachable", [P, D])
def test_a_server_that_cannot_be_reached_closes_the_other_leg(unreachable: Role) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        dead, other = (made.prefill[0], made.decode[0]) if unreachable is P else (made.decode[0], made.prefill[0])
        assert dead.server is not None
        await dead.server.close()
        status, raw = await ask(made)
        assert status == 503
        assert f"the {unreachable} server cannot be reached".encode() in raw
        await until(lambda: other.gone == len(other.bodies))
        assert push.fabric.clean

    pushing(test, probe_interval_seconds=600.0)


def test_of_two_refusals_at_once_the_clients_own_mistake_is_told() -> None:
    from baton.proxy.errors import ProxyError
    from baton.proxy.journey import EngineRefusal
    from baton.proxy.modes.write import first_failure
    from baton.proxy.upstream import Answer

    async def test() -> None:
        async def fail(error: Exception) -> Any:
            raise error

        async def told(first: Exception, second: Exception) -> BaseException | None:
            legs = [asyncio.create_task(fail(first)), asyncio.create_task(fail(second))]
            await asyncio.wait(legs)
            return first_failure(legs[0], legs[1])

        wrong, wrong_too, broken = (EngineRefusal(Answer(status, [], b"")) for status in (400, 404, 500))
        ours = ProxyError(502, "x")
        assert await told(wrong, wrong_too) is wrong
        assert await told(broken, wrong) is wrong
        assert await told(ours, wrong) is wrong
        assert await told(broken, ours) is broken
        assert await told(ours, broken) is ours

    asyncio.run(test())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "waiting", "decode", "stream"])
def test_a_client_that_leaves_closes_both_legs(phase: str, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        async def begin(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if streamed:
                await stream(request, [b"data: 1\n\n"])
            return await hang()

        if phase == "prefill":
            made.decode[0].answer = hang
        if phase in ("prefill", "waiting"):
            push.free[P].clear()
        if phase == "decode":
            push.free[D].clear()
        if phase == "stream":
            made.decode[0].answer = begin
        for count in range(1, 4):
            opening = asyncio.ensure_future(made.post({"prompt": "a", "stream": streamed}).__aenter__())
            await both_are_asked(made, count)
            if phase == "waiting":
                await until(lambda: len(push.fabric.registered) == 1)
            if phase == "stream" and streamed:
                (await opening).close()
            else:
                opening.cancel()
            await until(lambda count=count: made.decode[0].gone == count)  # type: ignore[misc]
            gone = count if phase in ("prefill", "waiting") else 0
            await until(lambda gone=gone: made.prefill[0].gone == gone)  # type: ignore[misc]
        assert push.fabric.registered == {}

    pushing(test)


def test_a_decode_server_that_is_still_being_called_hears_of_a_request_whose_prefill_is_done() -> None:
    async def test(made: House, push: Pushing) -> None:
        pool = made.proxy.way.upstream._pools["D0"]
        free, connect, waiting = asyncio.Event(), pool.connect, []

        async def slow() -> Any:
            waiting.append(1)
            await free.wait()
            return await connect()

        pool.sweep()
        pool.connect = slow  # type: ignore[method-assign]
        pool.take = lambda: None  # type: ignore[method-assign]
        opening = asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__())
        await until(lambda: push.fabric.finished.total() == 1 and made.proxy.fleet.pools[P][0].in_flight == 0)
        opening.cancel()
        # the proxy calls again for nobody: that server alone can have the blocks freed
        await until(lambda: len(waiting) == 2)
        free.set()
        await until(lambda: push.fabric.clean)

    pushing(test, probe_interval_seconds=600.0)


def test_a_prefill_server_that_has_restarted_is_waited_for_under_its_new_name() -> None:
    async def test(made: House, push: Pushing) -> None:
        push.starts = "-again"
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)
        # prefill ran once; the decode server gave the first leg up
        assert len(made.prefill[0].bodies) == 1
        assert [each["kv_transfer_params"]["remote_engine_id"] for each in made.decode[0].bodies] == ["e0", "e0-again"]
        await until(lambda: made.decode[0].gone == 1)
        assert push.fabric.clean
        assert await metric(made, "baton_handed_off_total") == 1
        # and the next request knows
        assert text_of((await ask(made))[1]) == TEXT
        assert made.decode[0].bodies[2]["kv_transfer_params"]["remote_engine_id"] == "e0-again"
        assert len(made.decode[0].bodies) == 3

    pushing(test, probe_interval_seconds=600.0)


def test_a_prefill_server_that_answers_as_another_is_asked_again_what_it_is() -> None:
    async def test(made: House, push: Pushing) -> None:
        assert made.prefill[0].asked == 1
        push.starts = "-again"
        made.prefill[0].about = about("e0-again", "kv_producer", tp_size=2)
        instance = made.proxy.fleet.pools[P][0]
        await ask(made)
        assert not instance.learned
        await made.proxy.way.upstream.probe(made.proxy.fleet)
        assert made.prefill[0].asked == 2
        assert instance.info is not None and instance.info.tp_size == 2

    pushing(test, probe_interval_seconds=600.0)


def test_a_decode_server_that_fails_over_an_engine_that_is_no_more_costs_one_request() -> None:
    async def test(made: House, push: Pushing) -> None:
        usual = made.decode[0].answer
        assert usual is not None

        async def strict(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["kv_transfer_params"]["remote_engine_id"] == "e0":
                return web.json_response({"error": "engine id mismatch"}, status=500)
            return await usual(engine, request, body)

        made.decode[0].answer = strict
        push.starts = "-again"
        push.free[P].clear()
        assert (await ask(made))[0] == 500
        push.free[P].set()
        for _ in range(2):
            assert text_of((await ask(made))[1]) == TEXT

    pushing(test, probe_interval_seconds=600.0)


def test_without_a_ticket_the_decode_server_computes_the_prompt_itself() -> None:
    async def test(made: House, push: Pushing) -> None:
        async def bare(*_: Any) -> web.StreamResponse:
            return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": None})

        made.prefill[0].answer = bare
        assert text_of((await ask(made))[1]) == TEXT
        await until(lambda: made.decode[0].gone == 1)
        assert ["kv_transfer_params" in body for body in made.decode[0].bodies] == [True, False]
        assert await metric(made, "baton_prefill_without_ticket_total") == 1
        assert await metric(made, "baton_handed_off_total") == 0

    pushing(test)


def test_a_data_parallel_prefill_server_is_told_which_rank_and_the_decode_server_where_it_is() -> None:
    def ranks(engines: list[FakeEngine]) -> None:
        engines[0].about = about("e0", "kv_producer", dp_size=3)

    async def test(made: House, push: Pushing) -> None:
        for _ in range(4):
            assert text_of((await ask(made))[1]) == TEXT
        told = [each["kv_transfer_params"] for each in made.decode[0].bodies]
        assert [each["remote_engine_id"] for each in told] == ["e0_dp1", "e0_dp2", "e0_dp0", "e0_dp1"]
        assert [each["remote_port"] for each in told] == [5560, 5561, 5559, 5560]
        assert [each["x-data-parallel-rank"] for each in made.prefill[0].headers] == ["1", "2", "0", "1"]
        assert all("x-data-parallel-rank" not in each for each in made.decode[0].headers)

    pushing(test, prepare=ranks)


def test_where_a_rank_cannot_be_asked_for_prefill_says_which_it_was() -> None:
    def ranks(engines: list[FakeEngine]) -> None:
        engines[0].about = about("e0", "kv_producer", dp_size=2)

    async def test(made: House, push: Pushing) -> None:
        status, _ = await ask(made, {"input": "a"}, path="/v1/responses")
        assert status == 200
        assert [each["kv_transfer_params"]["remote_engine_id"] for each in made.decode[0].bodies] == ["e0_dp0"]
        assert push.fabric.clean

    pushing(test, prepare=ranks)


@pytest.mark.parametrize("streamed", [False, True])
def test_samples_push_each_and_follow_the_first_of_them(streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        status, raw = await ask(made, {"prompt": "p", "n": 3, "stream": streamed})
        assert status == 200
        if not streamed:
            assert [each["text"] for each in json.loads(raw)["choices"]] == [TEXT] * 3
        assert len(push.fabric.pushed) == 3 and push.fabric.clean
        assert sorted(len(engine.bodies) for engine in made.prefill) == [0, 3]
        assert await metric(made, "baton_handed_off_total") == 3

    pushing(test, prefill=2, decode=2)


def test_a_part_that_fails_closes_both_legs_of_the_rest() -> None:
    async def test(made: House, push: Pushing) -> None:
        usual = push.prefill

        async def second_fails(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] == "b":
                await until(lambda: len(push.fabric.registered) == 3)
                return web.json_response({"error": "own words"}, status=400)
            if body["prompt"] == "c":
                return await hang()
            return await usual(engine, request, body)

        made.prefill[0].answer = second_fails
        push.free[P].clear()
        status, raw = await ask(made, {"prompt": ["a", "b", "c"]})
        assert (status, raw) == (400, b'{"error": "own words"}')
        await until(lambda: made.decode[0].gone == 3 and made.prefill[0].gone == 2)
        assert push.fabric.clean

    pushing(test)


def test_a_mixed_fleet_hands_nothing_over_and_says_who_differs(caplog: pytest.LogCaptureFixture) -> None:
    def mixed(engines: list[FakeEngine]) -> None:
        engines[1].about = about("e1", "kv_producer", "pull")

    async def test(made: House, push: Pushing) -> None:
        said = (
            "the engines differ in transfer mode (P0 write, P1 read, D0 write): "
            "start all of them with the same --transfer-mode"
        )
        for _ in range(2):
            status, raw = await ask(made)
            assert status == 503
            assert json.loads(raw)["error"]["message"] == said
        assert all(engine.bodies == [] for engine in (*made.prefill, *made.decode))
        status, text = await made.get("/readiness")
        assert (status, json.loads(text)["reason"], json.loads(text)["transfer_mode"]) == (503, said, None)
        _, text = await made.get("/instances")
        assert json.loads(text)["conflict"] == said
        assert [each["transfer_mode"] for each in json.loads(text)["instances"]] == ["write", "read", "write"]
        assert [record.message for record in caplog.records].count(f"nothing can be handed over: {said}") == 1
        # the one that differs goes out: the rest agree
        assert made.prefill[1].server is not None
        await made.prefill[1].server.close()
        await until(lambda: made.proxy.fleet.conflict is None)
        assert text_of((await ask(made))[1]) == TEXT
        assert (await made.get("/readiness"))[0] == 200

    with caplog.at_level(logging.INFO, "baton.proxy"):
        pushing(test, prepare=mixed, prefill=2, probe_interval_seconds=0.05)


def test_what_the_user_insists_on_the_engines_must_be() -> None:
    async def test(made: House, push: Pushing) -> None:
        status, raw = await ask(made)
        assert status == 503
        said = "read mode was asked for, but these are in another: P0, D0"
        assert json.loads(raw)["error"]["message"] == said

    pushing(test, transfer_mode=TransferMode.READ)


def stock(engines: list[FakeEngine]) -> None:
    for engine in engines:
        engine.about = None


@pytest.mark.parametrize("mode", [None, TransferMode.WRITE])
def test_a_stock_fleet_that_pushes_is_known_by_its_first_ticket(mode: TransferMode | None) -> None:
    async def test(made: House, push: Pushing) -> None:
        assert made.proxy.fleet.mode is (mode or TransferMode.READ)
        assert text_of((await ask(made))[1]) == TEXT
        # in turn: nobody knew where the first would come from
        assert made.decode[0].bodies[0]["kv_transfer_params"]["remote_block_ids"] == [[0]]
        assert made.proxy.fleet.mode is TransferMode.WRITE
        push.free[P].clear()
        reply = asking(made)
        await both_are_asked(made, 2)
        push.free[P].set()
        assert text_of((await reply)[1]) == TEXT
        assert made.decode[0].bodies[1]["kv_transfer_params"]["remote_engine_id"] == "stock"

    pushing(test, prepare=stock, transfer_mode=mode)


def test_a_stock_prefill_server_that_pulls_beside_one_that_pushes_is_found_by_its_ticket() -> None:
    def half(engines: list[FakeEngine]) -> None:
        engines[0].about = None

    async def test(made: House, push: Pushing) -> None:
        push.mode = "pull"
        status, raw = await ask(made)
        assert status == 503
        assert "(P0 read, D0 write)" in json.loads(raw)["error"]["message"]
        assert made.decode[0].bodies == []

    pushing(test, prepare=half)


def test_an_engine_that_says_nonsense_is_taken_for_a_stock_one(caplog: pytest.LogCaptureFixture) -> None:
    def nonsense(engines: list[FakeEngine]) -> None:
        stock(engines)
        engines[0].about = {"transfer_mode": "shout"}

    async def test(made: House, push: Pushing) -> None:
        assert made.proxy.fleet.mode is TransferMode.READ
        assert text_of((await ask(made))[1]) == TEXT

    with caplog.at_level(logging.WARNING, "baton.proxy"):
        pushing(test, prepare=nonsense)
    assert "P0 does not say what it is, and is taken for a stock engine: transfer_mode is 'shout'" in caplog.text


def test_an_engine_is_asked_what_it_is_at_each_probe_so_that_a_restart_between_two_is_seen() -> None:
    async def test(made: House, push: Pushing) -> None:
        engine, instance = made.decode[0], made.proxy.fleet.pools[D][0]
        void: list[str] = []
        made.proxy.fleet.on_new_engine(lambda each: void.append(each.id))
        await made.proxy.way.upstream.probe(made.proxy.fleet)
        assert engine.asked == 2
        assert void == []
        engine.about = about("e9", "kv_consumer")
        await made.proxy.way.upstream.probe(made.proxy.fleet)
        assert instance.info is not None and instance.info.engine_id == "e9"
        assert void == ["D0"]
        assert instance.outages == 0

    pushing(test, probe_interval_seconds=600.0)


def test_a_stock_engine_is_asked_what_it_is_once() -> None:
    def stock(engines: list[FakeEngine]) -> None:
        for engine in engines:
            engine.about = None

    async def test(made: House, push: Pushing) -> None:
        for _ in range(3):
            await made.proxy.way.upstream.probe(made.proxy.fleet)
        assert made.decode[0].asked == 1

    pushing(test, prepare=stock, probe_interval_seconds=600.0)


def test_an_engine_is_asked_again_what_it_is_when_it_comes_back() -> None:
    async def test(made: House, push: Pushing) -> None:
        engine, instance = made.decode[0], made.proxy.fleet.pools[D][0]
        assert engine.server is not None
        port = engine.server.port
        assert port is not None
        await engine.server.close()
        await until(lambda: not instance.usable)
        assert instance.info is None
        engine.about = about("e9", "kv_consumer")
        await engine.start_on(port)
        await until(lambda: instance.usable)
        assert instance.info is not None and instance.info.engine_id == "e9"
        await engine.server.close()

    pushing(test, probe_interval_seconds=0.05)


def test_the_parts_of_the_time_to_the_first_token_add_up_though_the_legs_overlap() -> None:
    from baton.proxy.admission import Gate
    from baton.proxy.fleet import Fleet
    from baton.proxy.journey import Times
    from baton.proxy.metrics import Metrics

    def sums(times: Times) -> dict[str, float]:
        metrics = Metrics(Fleet([]), Gate())
        metrics.split(times)
        lines = metrics.render().decode().splitlines()
        return {
            line.split('part="')[1].split('"')[0]: round(float(line.split()[-1]), 6)
            for line in lines
            if line.startswith("baton_ttft_part_seconds_sum")
        }

    # the decode server's head came first, and it came after
    early = sums(Times(1.0, 1.5, 1.6, 3.0, 1.6, 1.7, 4.0))
    assert early == {"queue": 0.5, "prefill": 1.4, "hand_off": 0.0, "first_token": 1.0, "overhead": 0.1}
    late = sums(Times(1.0, 1.5, 1.6, 3.0, 1.6, 3.2, 4.0))
    assert late == {"queue": 0.5, "prefill": 1.4, "hand_off": 0.2, "first_token": 0.8, "overhead": 0.1}
