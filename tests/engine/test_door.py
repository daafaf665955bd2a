"""The engine's door as an ASGI application: bad tickets are refused, streams get the ticket on their last chunk."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.door import CURRENT, Door, tickets_in, with_ticket
from tests.engine.test_tickets import PULL

TICKET = {"do_remote_decode": True, "remote_block_ids": ([1, 2],)}
SSE = [(b"content-type", b"text/event-stream; charset=utf-8")]


def config(connector: str = "BatonNixlConnector") -> Any:
    extra = {"bidirectional_kv_xfer": True}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector, engine_id="e-1", kv_role="kv_consumer", get_from_extra_config=extra.get
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=4),
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto"),
        model_config=SimpleNamespace(
            model="m",
            dtype="torch.float32",
            get_total_num_kv_heads=lambda: 4,
            get_head_size=lambda: 32,
            get_total_num_hidden_layers=lambda: 6,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        speculative_config=None,
    )


async def outputs(count: int) -> AsyncGenerator[Any, None]:
    """What the engine gives for one prompt: the last one is finished and has the ticket."""
    for number in range(count):
        last = number == count - 1
        yield SimpleNamespace(finished=last, kv_transfer_params=TICKET if last else None)


def streaming(events: Sequence[bytes], after_end: int, prompts: int = 1) -> Any:
    """An application that streams *events*; the last *after_end* of them, when the engine has ended.

    What goes out before an event is noted with it: ``seen`` holds how many messages had passed by then.
    """

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        outcome = CURRENT.get()
        running = [outputs(1) if outcome is None else outcome.watch(outputs(1)) for _ in range(prompts)]
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for index, event in enumerate(events):
            if index == len(events) - after_end:
                for each in running:
                    async for _ in each:
                        pass
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def call(
    app: Any,
    body: Any,
    path: str = "/v1/completions",
    connector: str = "BatonNixlConnector",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> list[Any]:
    sent: list[Any] = []
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    waiting = [
        {"type": "http.request", "body": raw[:5], "more_body": True},
        {"type": "http.request", "body": raw[5:], "more_body": False},
    ]

    async def receive() -> Any:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(dict(message))

    state = SimpleNamespace(state=SimpleNamespace(vllm_config=config(connector)))
    scope = {"type": "http", "path": path, "method": "POST", "app": state, "headers": headers}
    asyncio.run(Door(app)(scope, receive, send))
    return sent


def bodies(sent: Sequence[Any]) -> list[bytes]:
    return [message["body"] for message in sent if message["type"] == "http.response.body"]


def event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


ONE, LAST, USAGE, DONE = event({"t": 1}), event({"t": 2}), event({"usage": 3}), b"data: [DONE]\n\n"
WITH = {"t": 2, "kv_transfer_params": {"do_remote_decode": True, "remote_block_ids": [[1, 2]]}}
ASKED = {"prompt": "x", "stream": True, "kv_transfer_params": PULL}


def values(chunks: Sequence[bytes]) -> list[Any]:
    return [json.loads(chunk[6:]) for chunk in chunks if chunk.startswith(b"data: {")]


def test_the_last_chunk_carries_the_ticket() -> None:
    made = bodies(call(streaming([ONE, LAST, DONE], 2), ASKED))
    assert values(made) == [{"t": 1}, WITH]
    assert made[2:] == [DONE, b""]


def test_the_usage_chunk_is_the_last_when_there_is_one() -> None:
    made = values(bodies(call(streaming([ONE, LAST, USAGE, DONE], 3), ASKED)))
    assert made[:2] == [{"t": 1}, {"t": 2}]
    assert made[2] == {"usage": 3, "kv_transfer_params": WITH["kv_transfer_params"]}


def test_a_stream_without_done_has_it_on_its_last_event() -> None:
    named = b"event: message_stop\ndata: {}\n\n"
    made = bodies(call(streaming([ONE, named], 1), ASKED, "/v1/messages"))
    assert made[0] == ONE
    assert made[1].startswith(b'event: message_stop\ndata: {"kv_transfer_params":{')


def test_with_several_prompts_it_waits_for_all() -> None:
    made = values(bodies(call(streaming([ONE, LAST, DONE], 2, prompts=3), ASKED)))
    assert made == [{"t": 1}, WITH]


def test_without_a_ticket_nothing_is_added_and_nothing_looked_at() -> None:
    made = bodies(call(streaming([ONE, LAST, DONE], 2), {"prompt": "x", "stream": True}))
    assert made == [ONE, LAST, DONE, b""]


def test_what_comes_before_the_end_passes_at_once() -> None:
    """The application looks at what has been sent while it is still generating."""
    passed: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": SSE})
        for _ in range(3):
            await send({"type": "http.response.body", "body": ONE, "more_body": True})
            passed.append(len(sent))

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps(ASKED).encode(), "more_body": False}

    state = SimpleNamespace(state=SimpleNamespace(vllm_config=config()))
    asyncio.run(Door(app)({"type": "http", "path": "/v1/completions", "method": "POST", "app": state}, receive, send))
    assert passed == [2, 3, 4]


async def never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("the request reached the engine")


@pytest.mark.parametrize(
    "body",
    [
        {"kv_transfer_params": {**PULL, "remote_request_id": None}},
        {"kv_transfer_params": "x"},
        {"vllm_xargs": {"kv_transfer_params": []}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": 1}}},
        b'{"kv_transfer_param\\u0073": 5}',
    ],
)
def test_a_bad_ticket_is_that_requests_own_400(body: Any) -> None:
    start, end = call(never, body)
    assert start["status"] == 400
    assert json.loads(end["body"])["error"]["param"] == "kv_transfer_params"


def test_what_the_mode_needs_is_asked_for() -> None:
    (start, _) = call(never, {"kv_transfer_params": {**PULL, "tp_size": None}}, connector="BatonNixlPushConnector")
    assert start["status"] == 400


def test_a_body_that_is_no_json_is_the_engines_to_refuse() -> None:
    assert tickets_in(b"kv_transfer_params{") == []
    assert tickets_in(b'["kv_transfer_params"]') == []


def test_the_engine_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5659")
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    state = SimpleNamespace(state=SimpleNamespace(vllm_config=config()))
    scope = {"type": "http", "path": "/baton/engine", "method": "GET", "app": state}
    asyncio.run(Door(never)(scope, never, send))
    said = json.loads(sent[1]["body"])
    assert {**said.pop("compatibility"), "vllm_version": "?", "nixl_connector_version": "?"} == {
        "vllm_version": "?",
        "nixl_connector_version": "?",
        "model": "m",
        "dtype": "float32",
        "kv_cache_dtype": "auto",
        "num_kv_heads": 4,
        "head_size": 32,
        "num_layers": 6,
        "hybrid_kv_cache": False,
        "speculative": "none",
    }
    assert said == {
        "engine_id": "e-1",
        "transfer_mode": "pull",
        "role": "kv_consumer",
        "side_channel_host": "10.0.0.1",
        "side_channel_port": 5659,
        "tp_size": 2,
        "pp_size": 1,
        "dp_size": 4,
        "block_size": 32,
        "kv_lease_seconds": 30,
        "device": "cpu",
        "bidirectional": True,
    }


@pytest.mark.parametrize("chunk", [b"data: [DONE]\n\n", b": comment\n\n", b"", b"event: x\n\n"])
def test_a_chunk_without_an_object_stays(chunk: bytes) -> None:
    assert with_ticket(chunk, TICKET) == chunk


BAD = {"prompt": "x", "kv_transfer_params": {"do_remote_prefill": True, "remote_port": "x"}}


@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/v1/chat/completions/batch", "/some/day"])
@pytest.mark.parametrize("coding", ["utf-8", "utf-16", "utf-32"])
def test_every_path_and_every_coding_that_vllm_reads_is_looked_through(path: str, coding: str) -> None:
    raw = json.dumps(BAD).encode(coding)
    sent = call(never, raw, path)
    assert sent[0]["status"] == 400
    assert "remote_port" in json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize(
    "raw", [b'{"kv_transfer_params": {"a": NaN}, "do": 1%b}', b'{"kv_transfer_params": {"a": "\\ud800"}%b}']
)
def test_what_python_reads_as_json_is_looked_through(raw: bytes) -> None:
    """orjson would not read it, and the ticket would pass unseen."""
    assert len(tickets_in(raw % b"")) == 1


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    raw = b'{"kv_transfer_params": ' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001
    sent = call(never, raw)
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["message"] == "the body is nested too deeply"


@pytest.mark.parametrize("rank", [b"-1", b"4", b"x", b"1e0", b"99999999999999999999", b"\xb2"])
def test_a_rank_that_the_engine_has_not_is_refused(rank: bytes) -> None:
    sent = call(never, {"prompt": "x"}, headers=[(b"x-data-parallel-rank", rank)])
    assert sent[0]["status"] == 400
    assert "not a number from 0 to 3" in json.loads(sent[1]["body"])["error"]["message"]


def test_a_rank_that_it_has_passes() -> None:
    assert call(streaming([ONE], 0), {"prompt": "x"}, headers=[(b"x-data-parallel-rank", b"3")])[0]["status"] == 200


def test_an_upload_passes_as_it_comes() -> None:
    form = [(b"content-type", b"multipart/form-data; boundary=b")]
    assert call(streaming([ONE], 0), json.dumps(BAD).encode(), "/v1/audio", headers=form)[0]["status"] == 200
