"""Streams on their way through the proxy: put right where they must be, and never looking whole when they aren't."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from aiohttp import web

from tests.proxy.fakes import FakeEngine, House, hang, prefill_answer, stream, until, with_house

CHUNK = 'data: {"id":"c","choices":[{"index":0,"text":"caf\u00e9 \U0001f600"}]}\n\n'.encode()
LAST = (
    b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":50,"prompt_tokens_details":{"cached_tokens":50}},'
    b'"kv_transfer_params":{"remote_host":"10.9.8.7","remote_block_ids":[[1,2]]}}\n\n'
)
RIGHT = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":50,"prompt_tokens_details":{"cached_tokens":16}}}\n\n'
DONE = b"data: [DONE]\n\n"


async def prefill_with_16_cached(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    answer = await prefill_answer(engine, request, body)
    assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
    usage = {"prompt_tokens_details": {"cached_tokens": 16}}
    return web.json_response({**json.loads(answer.body), "usage": usage})


def answering(made: House, pieces: list[bytes], **headers: str) -> None:
    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return await stream(request, pieces, **headers)

    made.prefill[0].answer = prefill_with_16_cached
    made.decode[0].answer = answer


async def streamed(made: House, path: str = "/v1/completions") -> bytes:
    async with made.post({"prompt": "a", "stream": True}, path=path) as response:
        assert response.status == 200
        raw: bytes = await response.read()
    return raw


@pytest.mark.parametrize("crlf", [False, True])
def test_a_stream_cut_at_any_byte_is_put_right_and_else_unchanged(crlf: bool) -> None:
    async def test(made: House) -> None:
        chunk, last, done = (each.replace(b"\n", b"\r\n") if crlf else each for each in (CHUNK, LAST, DONE))
        raw = chunk + last + done
        for cut in range(1, len(raw)):
            answering(made, [raw[:cut], raw[cut:]])
            assert await streamed(made) == chunk + RIGHT + done

    with_house(test)


def test_a_stream_in_single_bytes_is_put_right_too() -> None:
    async def test(made: House) -> None:
        raw = CHUNK + LAST + DONE
        answering(made, [raw[at : at + 1] for at in range(len(raw))])
        assert await streamed(made) == CHUNK + RIGHT + DONE

    with_house(test)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("as_stream", [False, True])
def test_a_compressed_answer_is_put_right_and_framed_anew(coding: str, as_stream: bool) -> None:
    async def test(made: House) -> None:
        plain = CHUNK + LAST + DONE if as_stream else LAST[6:-2]
        packed = gzip.compress(plain) if coding == "gzip" else zlib.compress(plain)

        async def whole(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.Response(body=packed, headers={"Content-Encoding": coding, "Content-Type": "application/json"})

        if as_stream:
            answering(made, [packed[:30], packed[30:]], **{"Content-Encoding": coding})
        else:
            answering(made, [])
            made.decode[0].answer = whole
        async with made.post({"prompt": "a", "stream": as_stream}) as response:
            assert "Content-Encoding" not in response.headers
            raw = await response.read()
        assert raw == (CHUNK + RIGHT + DONE if as_stream else RIGHT[6:-2])

    with_house(test)


def test_an_answer_in_an_unknown_coding_is_a_502() -> None:
    async def test(made: House) -> None:
        async def odd(*_: Any) -> web.StreamResponse:
            return web.Response(body=b"?", headers={"Content-Encoding": "zstd", "Content-Type": "application/json"})

        made.decode[0].answer = odd
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 502

    with_house(test)


ENDS = [
    ("/v1/completions", [CHUNK], DONE),
    ("/v1/chat/completions", [CHUNK], DONE),
    ("/inference/v1/generate", [CHUNK], DONE),
    ("/v1/responses", [b"event: response.created\ndata: {}\n\n"], b"event: response.completed\ndata: {}\n\n"),
    (
        "/v1/messages",
        [b"event: message_start\ndata: {}\n\n"],
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ),
]


def error_of(raw: bytes, path: str) -> dict[str, Any]:
    """The error that a stream ends with, in the words of its API."""
    event = [each for each in raw.split(b"\n\n") if each][-1]
    if path in ("/v1/responses", "/v1/messages"):
        assert event.startswith(b"event: error\ndata: ")
    value = json.loads(event[event.index(b"{") :])
    if path == "/v1/messages":
        assert value["type"] == "error"
    error: dict[str, Any] = value["error"]
    return error


@pytest.mark.parametrize(("path", "first", "end"), ENDS)
def test_a_stream_that_is_whole_passes_byte_for_byte(path: str, first: list[bytes], end: bytes) -> None:
    async def test(made: House) -> None:
        answering(made, [*first, end])
        assert await streamed(made, path) == b"".join(first) + end

    with_house(test)


@pytest.mark.parametrize(("path", "first", "end"), ENDS)
def test_a_stream_that_ends_early_ends_with_an_error(path: str, first: list[bytes], end: bytes) -> None:
    async def test(made: House) -> None:
        for pieces in ([*first], [*first, end[:-3]], [*first, end[:5]]):
            answering(made, pieces)
            raw = await streamed(made, path)
            assert end not in raw and end[:-3] not in raw
            assert "before it was whole" in error_of(raw, path)["message"]
        _, metrics = await made.get("/metrics")
        assert "baton_stream_errors_total 3.0" in metrics
        assert f'baton_requests_total{{endpoint="{path}",status="502"}} 3.0' in metrics

    with_house(test)


@pytest.mark.parametrize("pieces", [[], [b"data: {"], [b'data: {"error": {"message": "as it was", "code": 500}}\n\n']])
def test_a_stream_that_fails_before_its_first_event_is_a_plain_error(pieces: list[bytes]) -> None:
    async def test(made: House) -> None:
        answering(made, pieces)
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert response.status == 502
            assert response.content_type == "application/json"
            assert (await response.json())["error"]["message"]
        _, metrics = await made.get("/metrics")
        assert "baton_stream_errors_total 0.0" in metrics

    with_house(test)


@pytest.mark.parametrize("reason", ["error", "abort"])
def test_a_generation_that_failed_is_no_success(reason: str) -> None:
    async def test(made: House) -> None:
        event = b'{"choices":[{"index":0,"text":"","finish_reason":"%b"}]}' % reason.encode()

        async def whole(*_: Any) -> web.StreamResponse:
            return web.Response(body=event, content_type="application/json")

        made.decode[0].answer = whole
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 502
            assert (await response.json())["error"]["type"] == "engine_error"
        answering(made, [CHUNK, b"data: " + event + b"\n\n", DONE])
        raw = await streamed(made)
        assert raw.startswith(CHUNK) and DONE not in raw
        assert error_of(raw, "")["code"] == 502
        made.prefill[0].answer = whole
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 502
        _, metrics = await made.get("/metrics")
        assert 'baton_requests_total{endpoint="/v1/completions",status="502"} 3.0' in metrics

    with_house(test)


def test_an_engines_own_error_event_arrives_and_no_done_after_it() -> None:
    async def test(made: House) -> None:
        error = b'data: {"error": {"message": "as it was", "code": 500}}\n\n'
        answering(made, [CHUNK, error, DONE])
        assert await streamed(made) == CHUNK + error
        _, metrics = await made.get("/metrics")
        assert "baton_stream_errors_total 1.0" in metrics

    with_house(test)


@pytest.mark.parametrize("streaming", [True, False])
def test_a_silent_prefill_sends_comments_when_asked_for(streaming: bool) -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = slow
        asking = asyncio.ensure_future(made.post({"prompt": "a", "stream": streaming}).__aenter__())
        if not streaming:
            await until(lambda: len(made.prefill[0].bodies) == 1)
            await asyncio.sleep(0.1)
            assert not asking.done()  # an answer in one piece has no place for comments
            free.set()
            assert (await asking).status == 200
            return
        response = await asking
        assert response.headers["Content-Type"].startswith("text/event-stream")
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        free.set()
        rest = await response.read()
        events = [event for event in rest.split(b"\n\n") if event and not event.startswith(b":")]
        assert [event[:6] for event in events] == [b"data: "] * 4
        assert events[-1] == b"data: [DONE]"

    with_house(test, keep_alive_seconds=0.03)


def test_a_comment_never_splits_an_event() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def halting(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request, [CHUNK[:20]])
            await free.wait()
            await response.write(CHUNK[20:] + DONE)
            return response

        made.decode[0].answer = halting
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            free.set()
            rest = await response.read()
        assert rest.replace(b": keep-alive\n\n", b"") == CHUNK + DONE
        assert CHUNK in rest

    with_house(test, keep_alive_seconds=0.03)


@pytest.mark.parametrize("breaker", ["prefill", "decode"])
def test_an_error_after_a_comment_is_an_event(breaker: str) -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def refuse(*_: Any) -> web.StreamResponse:
            await free.wait()
            return web.json_response({"error": {"message": "as it was", "code": 400}}, status=400)

        getattr(made, breaker)[0].answer = refuse
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            free.set()
            raw = await response.read()
        assert error_of(raw, "")["message"] == "as it was"
        assert DONE not in raw

    with_house(test, keep_alive_seconds=0.03)


def test_an_answer_in_one_piece_after_a_comment_is_an_error() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def whole(*_: Any) -> web.StreamResponse:
            await free.wait()
            return web.json_response({"choices": [{"text": "a"}]})

        made.decode[0].answer = whole
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            free.set()
            assert error_of(await response.read(), "")["code"] == 502

    with_house(test, keep_alive_seconds=0.03)


def test_without_comments_the_head_waits_for_the_engines() -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = hang
        asking = asyncio.ensure_future(made.post({"prompt": "a", "stream": True}).__aenter__())
        await until(lambda: len(made.prefill[0].bodies) == 1)
        await asyncio.sleep(0.05)
        assert not asking.done()
        asking.cancel()

    with_house(test)


@pytest.mark.parametrize("answered", ["stream", "one piece", "refused"])
def test_a_prompt_alone_that_takes_long_comes_after_comments(answered: str) -> None:
    events = b'data: {"choices": [{"text": "a b"}]}\n\ndata: [DONE]\n\n'

    async def test(made: House) -> None:
        free = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            if answered == "stream":
                return web.Response(body=events, content_type="text/event-stream")
            return web.json_response({"error": {"message": "no"}}, status=400 if answered == "refused" else 200)

        made.prefill[0].answer = slow
        async with made.post({"prompt": "a b", "echo": True, "max_tokens": 0, "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            free.set()
            rest = (await response.read()).replace(b": keep-alive\n\n", b"")
        if answered == "stream":
            assert rest == events
        else:
            (event,) = rest.split(b"\n\n")[:-1]
            assert json.loads(event.removeprefix(b"data: "))["error"]["message"] == (
                "no"
                if answered == "refused"
                else "the prefill server answered in one piece where a stream was asked for"
            )

    with_house(test, keep_alive_seconds=0.03)


def test_a_prompt_alone_is_answered_by_prefill() -> None:
    async def test(made: House) -> None:
        async def scored(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            return web.json_response({"choices": [{"text": body["prompt"]}], "asked": body})

        made.prefill[0].answer = scored
        body = {"prompt": "a b", "echo": True, "max_tokens": 0, "logprobs": 1}
        async with made.post(body) as response:
            assert response.status == 200
            assert (await response.json())["asked"] == body
            assert "x-baton-decode" not in response.headers
        assert made.decode[0].bodies == []

    with_house(test)


@pytest.mark.parametrize("streaming", [False, True])
def test_scores_of_the_prompt_come_from_prefill_and_never_reach_decode(streaming: bool) -> None:
    async def test(made: House) -> None:
        def scored(text: str, tokens: list[str], offsets: list[int]) -> dict[str, Any]:
            scores = {"tokens": tokens, "text_offset": offsets, "token_logprobs": [-1.0] * len(tokens)}
            return {"choices": [{"index": 0, "text": text, "logprobs": scores}]}

        async def prefill(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            assert (body["echo"], body["logprobs"]) == (True, 1)
            ticket = {"do_remote_prefill": True, "remote_block_ids": [[engine.ledger.give()]]}
            return web.json_response({**scored("a bX", ["a", " b", "X"], [0, 1, 3]), "kv_transfer_params": ticket})

        async def decode(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            answer = scored(" c", [" c"], [0])
            if not body.get("stream"):
                return web.json_response(answer)
            return await stream(request, [b"data: " + json.dumps(answer).encode() + b"\n\n", DONE])

        made.prefill[0].answer, made.decode[0].answer = prefill, decode
        async with made.post({"prompt": "a b", "echo": True, "logprobs": 1, "stream": streaming}) as response:
            assert response.status == 200
            raw = await response.read()
        answer = json.loads(raw.split(b"\n\n")[0].removeprefix(b"data: ")) if streaming else json.loads(raw)
        assert answer == scored("a b c", ["a", " b", " c"], [0, 1, 3])

    with_house(test)
