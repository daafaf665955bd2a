"""What is put right in an engine's answer, and that nothing else is touched."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from baton.proxy import legs
from baton.proxy.answers import Correction, Prefilled, failed
from baton.proxy.errors import ProxyError
from baton.proxy.ticket import Ticket

TICKET = Ticket({"do_remote_prefill": True}, 0.0)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def correction(
    path: str = COMPLETIONS,
    prefill: dict[str, Any] | None = None,
    body: dict[str, Any] | None = None,
    ticket: Ticket | None = TICKET,
) -> Correction:
    rules, asked = legs.RULES[path], body or {}
    return Correction(rules, asked, Prefilled(ticket, prefill or {}), legs.asks_prompt_scores(asked, rules))


@pytest.mark.parametrize(
    "raw",
    [
        b'{"choices": [{"text": "kv_transfer_params cached"}],  "kv_transfer_params":null}',
        b'{"choices":[{"text":"\\"kv_transfer_params\\": {"}],"usage":{"prompt_tokens_details":null}}',
        b"not JSON at all",
    ],
)
def test_an_answer_that_is_right_passes_byte_for_byte(raw: bytes) -> None:
    assert correction().whole(raw) == raw


@pytest.mark.parametrize("key", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("space", [b"", b" "])
def test_hosts_and_blocks_are_taken_out_of_answers_and_events(key: str, space: bytes) -> None:
    raw = b'{"choices":[1],"%b":%b{"remote_host":"10.0.0.1"}}' % (key.encode(), space)
    assert orjson.loads(correction().whole(raw)) == {"choices": [1]}
    run, error = correction().run(b"id: 1\ndata: " + raw + b"\n\ndata: [DONE]\n\n")
    assert (run, error) == (b'id: 1\ndata: {"choices":[1]}\n\ndata: [DONE]\n\n', None)
    nested = b'{"response":{"id":"r","%b":%b{"remote_host":"10.0.0.1"}}}' % (key.encode(), space)
    assert b"10.0.0.1" not in correction("/v1/responses").run(b"data: " + nested + b"\n\n")[0]


@pytest.mark.parametrize(
    "rest", [b"", b'"id":"c","object":"o","created":1,"model":"m","choices":[],', b'"choices":[],"usage":null,']
)
def test_an_event_that_held_nothing_but_a_ticket_is_left_out(rest: bytes) -> None:
    raw = b'data: {%b"kv_transfer_params":{"remote_host":"10.0.0.1"}}\n\n' % rest
    assert correction().run(b"data: 1\n\n" + raw + b"data: [DONE]\n\n") == (b"data: 1\n\ndata: [DONE]\n\n", None)


@pytest.mark.parametrize("rest", [b'"type":"message_stop"', b'"choices":[],"usage":{"prompt_tokens":1}'])
def test_an_event_that_said_something_else_stays(rest: bytes) -> None:
    raw = b'event: e\ndata: {%b,"kv_transfer_params":{"remote_host":"10.0.0.1"}}\n\n' % rest
    assert correction().run(raw) == (b"event: e\ndata: {%b}\n\n" % rest, None)


def test_an_event_that_names_hosts_and_is_no_json_is_dropped() -> None:
    assert correction().run(b'data: {"kv_transfer_params": {"a\n\ndata: 1\n\n') == (b"data: 1\n\n", None)


def openai(cached: int | None) -> dict[str, Any]:
    return {
        "usage": {"prompt_tokens": 50, "prompt_tokens_details": None if cached is None else {"cached_tokens": cached}}
    }


def responses(cached: int) -> dict[str, Any]:
    details = {"cached_tokens": cached, "cached_tokens_per_turn": [cached]}
    return {"usage": {"input_tokens": 50, "input_tokens_details": details}}


def anthropic(cached: int) -> dict[str, Any]:
    return {"usage": {"input_tokens": 50 - cached, "cache_read_input_tokens": cached}}


@pytest.mark.parametrize(
    ("path", "prefill", "decode", "told"),
    [
        (COMPLETIONS, openai(16), openai(50), openai(16)),
        (CHAT, openai(0), openai(50), openai(0)),
        (CHAT, openai(None), openai(50), openai(None)),
        (CHAT, openai(16), openai(None), openai(None)),
        ("/v1/responses", responses(16), responses(50), responses(16)),
        ("/v1/responses", {}, responses(50), responses(0)),
        ("/v1/messages", anthropic(16), anthropic(48), anthropic(16)),
        ("/v1/messages", {}, anthropic(48), anthropic(0)),
    ],
)
def test_cached_tokens_are_the_prefill_servers(
    path: str, prefill: dict[str, Any], decode: dict[str, Any], told: dict[str, Any]
) -> None:
    assert orjson.loads(correction(path, prefill).whole(orjson.dumps(decode))) == told
    for holder in ("response", "message"):
        event = b"event: x\ndata: " + orjson.dumps({"type": "t", holder: decode}) + b"\n\n"
        run, _ = correction(path, prefill).run(event)
        assert run.startswith(b"event: x\ndata: ")
        assert orjson.loads(run[15:])[holder] == told


def test_cached_tokens_are_the_decode_servers_when_nothing_was_handed_over() -> None:
    raw = orjson.dumps(openai(32))
    assert correction(COMPLETIONS, openai(16), ticket=None).whole(raw) == raw


def test_only_the_event_with_usage_changes() -> None:
    text = b'data: {"choices": [ {"text": "a"} ]}\r\n\r\n'
    run, _ = correction(COMPLETIONS, openai(16)).run(text + b"data: " + orjson.dumps(openai(50)) + b"\n\n" + text)
    assert run == text + b"data: " + orjson.dumps(openai(16)) + b"\n\n" + text


@pytest.mark.parametrize("reason", ["error", "abort"])
@pytest.mark.parametrize("space", [b"", b" "])
def test_a_failed_generation_is_an_error(reason: str, space: bytes) -> None:
    raw = b'{"choices":[{"index":0,"finish_reason":%b"%b"}]}' % (space, reason.encode())
    assert failed(raw)
    with pytest.raises(ProxyError) as caught:
        correction().whole(raw)
    assert caught.value.status == 502
    run, error = correction().run(b"data: {}\n\ndata: " + raw + b"\n\ndata: [DONE]\n\n")
    assert run == b"data: {}\n\n"
    assert error is not None and orjson.loads(error)["error"]["code"] == 502


def test_a_model_that_writes_of_errors_has_not_failed() -> None:
    raw = orjson.dumps({"choices": [{"text": '"finish_reason":"error"', "finish_reason": "stop"}]})
    assert not failed(raw)
    assert correction().run(b"data: " + raw + b"\n\n") == (b"data: " + raw + b"\n\n", None)


ECHOED: list[dict[str, Any]] = [
    {"metadata": {"finish_reason": "error", "status": "failed", "error": "x", "kv_transfer_params": "x"}},
    {"tools": [{"name": "f", "parameters": {"default": {"finish_reason": "abort", "choices": []}}}]},
    {"metadata": {"choices": [{"finish_reason": "error"}]}},
]


@pytest.mark.parametrize("said", ECHOED)
def test_what_a_client_said_is_no_failure_when_an_engine_says_it_again(said: dict[str, Any]) -> None:
    answer = {"id": "resp_1", "status": "completed", "error": None, "output": [], **said}
    assert not failed(orjson.dumps(answer))
    assert orjson.loads(correction("/v1/responses").whole(orjson.dumps(answer))) == answer
    for name in ("response.created", "response.completed"):
        event = b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, "response": answer}))
        assert correction("/v1/responses").run(event) == (event, None)


@pytest.mark.parametrize("event", [b'data: {"error": {"code": 500}}\n\n', b'event: error\ndata: {"type":"error"}\n\n'])
def test_an_engines_error_event_ends_the_stream(event: bytes) -> None:
    run, error = correction().run(b"data: 1\n\n" + event + b"data: [DONE]\n\n")
    assert run == b"data: 1\n\n"
    assert error == event[event.index(b"{") : -2]


def scored(text: str, tokens: list[str], offsets: list[int]) -> dict[str, Any]:
    logprobs = {
        "tokens": tokens,
        "text_offset": offsets,
        "token_logprobs": [-1.0] * len(tokens),
        "top_logprobs": [{"t": -1.0}] * len(tokens),
    }
    return {"choices": [{"text": text, "logprobs": logprobs}]}


@pytest.mark.parametrize("prompt", ["ab c", [1, 2]])
def test_an_echo_with_logprobs_is_the_prompts_from_prefill_and_the_texts_from_decode(prompt: Any) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": 1}
    prefill = scored("ab c X", ["ab", " c", " X"], [0, 2, 4])
    decode = scored(" Y Z", [" Y", " Z"], [0, 2])
    made = correction(COMPLETIONS, prefill, body).value(orjson.dumps(decode))
    assert made == scored("ab c Y Z", ["ab", " c", " Y", " Z"], [0, 2, 4, 6])


def test_an_echo_stands_in_the_first_event_alone() -> None:
    body = {"prompt": "ab c", "echo": True, "logprobs": 1}
    right = correction(COMPLETIONS, scored("ab c X", ["ab", " c", " X"], [0, 2, 4]), body)
    first, second = (orjson.dumps(scored(text, [text], [0])) for text in (" Y", " Z"))
    run, _ = right.run(b"data: " + first + b"\n\n")
    assert orjson.loads(run[6:])["choices"][0]["text"] == "ab c Y"
    assert not right.concerns(b"data: " + second + b"\n\n")


@pytest.mark.parametrize(
    ("path", "body", "prefill", "decode"),
    [
        (
            COMPLETIONS,
            {"prompt_logprobs": 1},
            {"choices": [{"prompt_logprobs": [None, 1]}]},
            {"choices": [{"text": "a"}]},
        ),
        (CHAT, {"prompt_logprobs": 1}, {"choices": [{}], "prompt_logprobs": [None, 1]}, {"choices": [{"text": "a"}]}),
    ],
)
def test_logprobs_of_the_prompt_come_from_prefill(
    path: str, body: dict[str, Any], prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    made = correction(path, prefill, body).value(orjson.dumps(decode))
    assert made["choices"][0]["text"] == "a"
    assert (made.get("prompt_logprobs") or made["choices"][0]["prompt_logprobs"]) == [None, 1]
