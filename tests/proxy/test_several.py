"""Requests for several answers, over real sockets: a ticket each, and one answer for the client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.fakes import FakeEngine, House, hang, prefill_answer, settled, stream, until, with_house


def text_of(body: dict[str, Any]) -> str:
    return f"<{body.get('prompt', 'chat')} {body.get('seed', '')}>"


async def prefill(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """As usual, with the usage of a server that had a part of the prompt."""
    ticket = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[engine.ledger.give()]]}
    size = len(str(body.get("prompt", "chat")))
    usage = {"prompt_tokens": size, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
    return web.json_response({"choices": [{"index": 0, "text": "x"}], "usage": usage, "kv_transfer_params": ticket})


async def decode(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Two events of text, one of usage when asked for; or the same in one piece."""
    size = len(str(body.get("prompt", "chat")))
    usage = {
        "prompt_tokens": size,
        "completion_tokens": 2,
        "total_tokens": size + 2,
        "prompt_tokens_details": {"cached_tokens": size},
    }
    name = {"id": request.headers["x-request-id"], "created": len(engine.bodies)}
    if not body.get("stream"):
        choice = {"index": 0, "text": text_of(body), "finish_reason": "length"}
        return web.json_response({**name, "choices": [choice], "usage": usage})
    events: list[dict[str, Any]] = [
        {**name, "choices": [{"index": 0, "text": part, "finish_reason": None}]}
        for part in (text_of(body)[:2], text_of(body)[2:])
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        events.append({**name, "choices": [], "usage": usage})
    lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    return await stream(request, [*lines, b"data: [DONE]\n\n"])


def several(made: House) -> None:
    for engine in made.prefill:
        engine.answer = prefill
    for engine in made.decode:
        engine.answer = decode


def texts(raw: bytes) -> dict[int, str]:
    """The texts of a stream by index; it ends with one [DONE]."""
    events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]" and events.count(b"[DONE]") == 1
    found: dict[int, str] = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompts", [["a", "bb", "ccc"], [[1], [2, 3], [4, 5, 6]]])
def test_a_list_of_prompts_is_a_ticket_each_and_comes_back_in_order(streamed: bool, prompts: list[Any]) -> None:
    async def test(made: House) -> None:
        several(made)
        body = {"prompt": prompts, "stream": streamed}
        async with made.post(body) as response:
            assert response.status == 200
            raw = await response.read()
        found = texts(raw) if streamed else {each["index"]: each["text"] for each in json.loads(raw)["choices"]}
        assert found == {index: text_of({"prompt": prompt}) for index, prompt in enumerate(prompts)}
        if not streamed:
            assert [each["index"] for each in json.loads(raw)["choices"]] == [0, 1, 2]
        assert sorted(made.ledger.pulled) == [0, 1, 2]
        assert made.ledger.held == set()
        ids = {headers["x-request-id"] for headers in made.prefill[0].headers}
        assert len(ids) == 3
        assert ids == {headers["x-request-id"] for engine in made.decode for headers in engine.headers}

    with_house(test, decode=2)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 4])
def test_samples_have_a_ticket_each_and_a_seed_each(path: str, streamed: bool, samples: int) -> None:
    async def test(made: House) -> None:
        several(made)
        async with made.post({"prompt": "p", "n": samples, "seed": 5, "stream": streamed}, path=path) as response:
            raw = await response.read()
        found = texts(raw) if streamed else {each["index"]: each["text"] for each in json.loads(raw)["choices"]}
        assert found == {index: f"<p {5 + index}>" for index in range(samples)}
        assert len(made.ledger.pulled) == samples
        assert (
            all("n" not in body for engine in (*made.prefill, *made.decode) for body in engine.bodies) or samples == 1
        )
        # the samples of one prompt follow the first to where its cache is
        assert sorted(len(engine.bodies) for engine in made.prefill) == [0, samples]

    with_house(test, prefill=2)


def test_the_first_sample_computes_the_prompt_and_the_rest_find_it() -> None:
    async def test(made: House) -> None:
        several(made)
        free = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await prefill(engine, request, body)

        made.prefill[0].answer = slow
        asking = asyncio.ensure_future(made.post({"prompt": "p", "n": 3}).__aenter__())
        await until(lambda: len(made.prefill[0].bodies) == 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(made.prefill[0].bodies) == 1
        free.set()
        assert (await asking).status == 200
        assert len(made.prefill[0].bodies) == 3

    with_house(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_usage_is_of_all_parts_with_the_prefill_servers_cached_tokens(streamed: bool) -> None:
    async def test(made: House) -> None:
        several(made)
        body = {"prompt": ["a", "bbb"], "n": 2, "stream": streamed}
        if streamed:
            body["stream_options"] = {"include_usage": True}
        async with made.post(body) as response:
            raw = await response.read()
        whole = json.loads(raw.split(b"\n\n")[-3].removeprefix(b"data: ")) if streamed else json.loads(raw)
        assert whole["usage"] == {
            "prompt_tokens": 4,
            "completion_tokens": 8,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        if streamed:
            assert whole["choices"] == []
            lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if b"{" in line]
            assert len({json.loads(line)["id"] for line in lines}) == 1
            assert sum(b'"usage"' in line for line in lines) == 1

    with_house(test)


@pytest.mark.parametrize("breaker", ["prefill", "decode"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_refusal_of_one_part_is_the_answer_and_ends_the_rest(breaker: str, streamed: bool) -> None:
    async def test(made: House) -> None:
        several(made)
        engine = getattr(made, breaker)[0]
        usual = engine.answer

        async def refuse(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] == "too long":
                await until(lambda: len(engine.bodies) == 3)
                return web.json_response({"error": {"message": "too long"}}, status=400)
            if streamed or breaker == "prefill":
                return await usual(engine, request, body)
            return await hang()

        engine.answer = refuse
        async with made.post({"prompt": ["a", "too long", "b"], "stream": streamed}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"] == "too long"
        await until(lambda: all(instance.in_flight == 0 for instance in made.proxy.fleet))
        engine.answer = usual
        async with made.post({"prompt": ["a", "b"]}) as response:
            assert response.status == 200

    with_house(test)


def test_a_part_that_breaks_mid_stream_ends_the_whole_with_an_error_and_no_done() -> None:
    async def test(made: House) -> None:
        several(made)

        async def half(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if body["prompt"] == "a":
                return await decode(engine, request, body)
            event = b'data: {"id": "x", "choices": [{"index": 0, "text": "t"}]}\n\n'
            response = await stream(request, [event])
            assert request.transport is not None
            request.transport.abort()
            return response

        made.decode[0].answer = half
        async with made.post({"prompt": ["a", "b"], "stream": True}) as response:
            assert response.status == 200
            raw = await response.read()
        assert b"[DONE]" not in raw
        assert json.loads(raw.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == 502

    with_house(test)


def test_a_part_that_is_ahead_of_the_rest_is_held_back() -> None:
    async def test(made: House) -> None:
        several(made)
        free, written = asyncio.Event(), 0

        async def uneven(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal written
            if body["prompt"] == "late":
                await free.wait()
                return await decode(engine, request, body)
            event = b'data: {"id": "x", "choices": [{"index": 0, "text": "%b"}]}\n\n' % (b"x" * (1 << 20))
            response = await stream(request, [])
            for _ in range(64):
                await response.write(event)
                written += 1
            await response.write(b"data: [DONE]\n\n")
            return response

        made.decode[0].answer = uneven
        asking = asyncio.ensure_future(made.post({"prompt": ["fast", "late"], "stream": True}).__aenter__())
        await until(lambda: len(made.decode[0].bodies) == 2)
        assert await settled(lambda: written) < 32  # what sockets hold, and not all of it
        free.set()
        raw = await (await asking).read()
        assert len(texts(raw)[0]) == 64 << 20

    with_house(test)


@pytest.mark.parametrize("commented", [False, True])
def test_a_part_in_one_piece_where_a_stream_was_asked_for_is_an_error(commented: bool) -> None:
    """Neither does the rest wait for it for ever, nor does a comment before it make the whole look complete."""

    async def test(made: House) -> None:
        several(made)
        free = asyncio.Event()

        async def odd(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await decode(engine, request, {**body, "stream": body["prompt"] == "a"})

        made.decode[0].answer = odd
        asking = asyncio.ensure_future(made.post({"prompt": ["a", "b"], "stream": True}).__aenter__())
        if commented:
            await (await asking).content.readuntil(b"\n\n")
        free.set()
        async with asyncio.timeout(10):
            response = await asking
            raw = await response.read()
        assert response.status == (200 if commented else 502)
        assert b"in another way" in raw and b"[DONE]" not in raw

    with_house(test, keep_alive_seconds=0.03 if commented else None)


def test_a_client_that_leaves_ends_all_parts() -> None:
    async def test(made: House) -> None:
        several(made)
        made.decode[0].answer = hang
        asking = asyncio.ensure_future(made.post({"prompt": ["a", "b", "c"]}).__aenter__())
        await until(lambda: len(made.decode[0].bodies) == 3)
        asking.cancel()
        await until(lambda: made.decode[0].gone == 3)
        await until(lambda: all(instance.in_flight == 0 for instance in made.proxy.fleet))

    with_house(test)


def test_an_unclamped_n_would_show_in_the_ledger() -> None:
    """The fakes hold one cache a sample, as engines do: this is what the tests above would see."""

    async def test(made: House) -> None:
        async with made.client.post(
            f"http://127.0.0.1:{made.prefill[0].endpoint.port}/v1/completions", json={"prompt": "p", "n": 4}
        ) as response:
            assert response.status == 200
        assert len(made.ledger.held) == 4

    assert prefill_answer is not None
    with_house(test)
