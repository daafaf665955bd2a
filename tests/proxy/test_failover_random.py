"""Random faults in every phase, clients that leave at random: what holds whatever happens."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Role
from baton.proxy import Retries
from tests.proxy.fakes import FakeEngine, House, prefill_answer, stream, until, with_house
from tests.proxy.push_fakes import Pushing, vllm_id
from tests.proxy.test_failover import cut, cut_after_head, cut_in_json, error_event, generation_fails, refusing

P, D = Role.PREFILL, Role.DECODE
REQUESTS, AT_ONCE = 150, 10
Answer = Callable[[FakeEngine, web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
STARTS: list[Answer] = [
    refusing(500),
    refusing(503),
    refusing(400),
    cut,
    cut_after_head,
    cut_in_json,
    generation_fails,
    error_event,
]


async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any], dice: random.Random) -> Any:
    """An answer that names its prompt twice, or as much of it as there is before the stream is cut."""
    if not body.get("stream"):
        choice = {"index": 0, "text": f"<{body['prompt']}><{body['prompt']}>", "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})
    event = b'data: {"choices": [{"index": 0, "text": "<%b>"}]}\n\n' % body["prompt"].encode()
    response = await stream(request, [event])
    if dice.random() < 0.1:
        await asyncio.sleep(0.01)
        return await cut(engine, request, body)
    await response.write(event + b"data: [DONE]\n\n")
    return response


def texts(raw: bytes) -> dict[int, str] | None:
    """What a whole answer says, by index; None for one that shows that it is not whole."""
    if raw.startswith(b"{"):
        return {each["index"]: each["text"] for each in json.loads(raw)["choices"]}
    if not raw.endswith(b"data: [DONE]\n\n"):
        assert b'"error"' in raw
        return None
    found: dict[int, str] = {}
    for event in raw.split(b"\n\n")[:-2]:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


async def client(made: House, number: int, dice: random.Random) -> str:
    """One request; what came of it, which is never a wrong answer."""
    prompts = [f"{number}-{part}" for part in range(dice.choice([1, 1, 1, 3]))]
    body = {"prompt": prompts[0] if len(prompts) == 1 else prompts, "stream": dice.random() < 0.5}
    try:
        async with asyncio.timeout(dice.choice([60.0, 60.0, 60.0, 0.001, 0.01, 0.03])):
            async with made.post(body) as response:
                raw = await response.read()
    except TimeoutError:
        return "left"
    if response.status != 200:
        assert raw
        return "refused"
    found = texts(raw)
    if found is None:
        return "broken"
    assert found == {index: f"<{prompt}><{prompt}>" for index, prompt in enumerate(prompts)}
    return "answered"


async def clients(made: House, dice: random.Random) -> dict[str, int]:
    ended: list[str] = []
    numbers = iter(range(REQUESTS))

    async def one_after_the_other() -> None:
        for number in numbers:
            ended.append(await client(made, number, dice))

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_the_other())
    return {kind: ended.count(kind) for kind in ended}


async def nothing_is_left(made: House) -> None:
    tickets = made.proxy.way.outstanding
    await until(lambda: made.proxy.way.gate.active == 0 and not made.proxy.way.releases.under_way, 5.0)
    await until(lambda: not any(each.in_flight or tickets.count(each.id) for each in made.proxy.fleet), 5.0)
    for each in made.proxy.fleet.pools[P]:
        assert tickets.given[each.id] == tickets.used[each.id] + tickets.dropped[each.id]
        assert tickets.expired[each.id] == 0


def faulty(usual: Answer, dice: random.Random) -> Answer:
    """An engine that fails every fifth request in one way or another, and is slow at times."""

    async def maybe(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() * 0.02)
        if dice.random() < 0.2:
            fault = dice.choice(STARTS)
            if not (engine.role is P and fault is error_event):
                return await fault(engine, request, body)
        return await usual(engine, request, body)

    return maybe


OPTIONS: dict[str, Any] = {
    "prefill": 3,
    "decode": 3,
    "probe_interval_seconds": 600.0,
    "retries": Retries(initial_seconds=0.001, max_seconds=0.01),
}


@pytest.mark.parametrize("seed", range(3))
def test_in_read_mode_no_answer_is_wrong_and_every_ticket_is_taken_once(seed: int) -> None:
    dice = random.Random(seed)

    async def decode(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        answered: web.StreamResponse = await answer(engine, request, body, dice)
        return answered

    async def test(made: House) -> None:
        for engine in made.prefill:
            engine.answer = faulty(prefill_answer, dice)
        for engine in made.decode:
            engine.answer = faulty(decode, dice)
        ended = await clients(made, dice)
        assert ended["answered"] > REQUESTS / 10, ended
        await nothing_is_left(made)
        # given, then taken by one decode server: the ledger refuses a second
        await until(lambda: made.ledger.held == set(), 5.0)

    with_house(test, **OPTIONS)


@pytest.mark.parametrize("seed", range(3))
def test_in_write_mode_no_answer_is_wrong_and_every_push_meets_its_own(seed: int) -> None:
    dice = random.Random(seed)
    push = Pushing()

    async def decode(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body.get("kv_transfer_params")
        if params is not None:
            await push.fabric.register(params["remote_engine_id"], vllm_id(request, body))
        answered: web.StreamResponse = await answer(engine, request, body, dice)
        return answered

    def prepare(engines: list[FakeEngine]) -> None:
        push.prepare(engines)
        for engine in engines:
            engine.answer = faulty(push.prefill if engine.role is P else decode, dice)

    async def test(made: House) -> None:
        ended = await clients(made, dice)
        assert ended["answered"] > REQUESTS / 10, ended
        await nothing_is_left(made)
        # no decode server waits for a push that will not come; what no server came for waits for its lease
        await until(lambda: push.fabric.registered == {}, 5.0)
        assert len(set(push.fabric.pushed)) == len(push.fabric.pushed)

    with_house(test, prepare=prepare, **OPTIONS)


def test_the_fakes_would_show_a_ticket_that_is_taken_twice() -> None:
    async def test(made: House) -> None:
        body = {"prompt": "a", "kv_transfer_params": {"remote_block_ids": [[made.ledger.give()]]}}
        for count in range(2):
            async with made.client.post(
                f"http://127.0.0.1:{made.decode[0].endpoint.port}/v1/completions", json=body
            ) as response:
                assert response.status == 200
            assert len(made.ledger.poison) == count
        made.ledger.poison.clear()

    with_house(test)
