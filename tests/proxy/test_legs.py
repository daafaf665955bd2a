from __future__ import annotations

from typing import Any

import orjson
import pytest

from baton.proxy import legs
from baton.proxy.samples import parts
from baton.proxy.ticket import Ticket

TICKET = Ticket({"do_remote_prefill": True, "remote_engine_id": "e1", "future_key": [1]}, given_at=0.0)


@pytest.mark.parametrize(
    "caps",
    [{}, {"max_tokens": 50}, {"max_completion_tokens": 60}, {"max_tokens": 50, "max_completion_tokens": 60}],
)
@pytest.mark.parametrize("stream", [True, False])
def test_prefill_leg_caps_every_token_limit(caps: dict[str, int], stream: bool) -> None:
    leg = legs.prefill_leg({"prompt": "a", "stream": stream, **caps})
    assert {leg[name] for name in legs.COMPLETIONS.caps if name in leg} == {1}
    assert leg["max_tokens"] == 1
    assert leg["stream"] is False


@pytest.mark.parametrize("null", legs.COMPLETIONS.caps)
def test_a_null_cap_is_no_cap(null: str) -> None:
    assert legs.prefill_leg({"prompt": "a", null: None})["max_tokens"] == 1


@pytest.mark.parametrize("field", ["min_tokens", "stream_options", "stop", "stop_token_ids", "logprobs"])
def test_prefill_leg_drops_what_contradicts_one_token(field: str) -> None:
    assert field not in legs.prefill_leg({"prompt": "a", field: 5})


def test_prefill_leg_asks_for_a_ticket_with_all_its_keys() -> None:
    assert legs.prefill_leg({"prompt": "a"})["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }


def test_prefill_leg_ends_by_length_and_not_at_a_stop() -> None:
    assert legs.prefill_leg({"prompt": "a", "stop": ["1"]})["ignore_eos"] is True


def decoded(raw: bytes, ticket: Ticket | None) -> Any:
    """What the decode server reads when a client sends *raw*."""
    return orjson.loads(b"".join(legs.decode_body(legs.parse(raw)[1], ticket)))


def test_decode_leg_is_the_clients_body_and_the_ticket() -> None:
    body = {"prompt": "a", "max_tokens": 7, "min_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    assert decoded(orjson.dumps(body), TICKET) == {
        **body,
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "e1", "future_key": [1]},
    }


@pytest.mark.parametrize(
    "said",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}},
        {"kv_transfer_params": "evil"},
        {"ec_transfer_params": {"remote_host": "evil"}},
        {"vllm_xargs": {"kv_transfer_params": "evil", "mine": 1}},
        {"sampling_params": {"extra_args": {"kv_transfer_params": {"remote_host": "evil"}}, "top_k": 1}},
        {"sampling_params": {"extra_args": {"ec_transfer_params": "evil"}}},
        {"extra_args": {"kv_transfer_params": "evil"}},
    ],
)
@pytest.mark.parametrize("path", legs.RULES)
def test_what_only_the_proxy_may_say_reaches_no_engine(path: str, said: dict[str, Any]) -> None:
    raw = orjson.dumps({"prompt": "a", **said})
    body, kept = legs.parse(raw)
    assert b"evil" not in orjson.dumps(legs.prefill_leg(body, legs.RULES[path]))
    assert b"evil" not in b"".join(legs.decode_body(kept, TICKET))
    assert b"evil" not in b"".join(legs.decode_body(kept, None))
    # and nothing else is lost
    assert body.get("vllm_xargs", {}).get("mine", 1) == 1
    assert body.get("sampling_params", {}).get("top_k", 1) == 1


def test_an_escaped_or_doubled_key_is_found_too() -> None:
    for raw in (
        b'{"prompt": "a", "kv_transfer\\u005fparams": {"remote_host": "evil"}}',
        b'{"kv_transfer_params": null, "prompt": "a", "kv_transfer_params": {"remote_host": "evil"}}',
    ):
        assert b"evil" not in b"".join(legs.decode_body(legs.parse(raw)[1], TICKET))


def test_legs_leave_the_clients_body_alone() -> None:
    body = {"prompt": "a", "max_tokens": 7, "sampling_params": {"n": 1}}
    before = orjson.dumps(body)
    for rules in legs.RULES.values():
        legs.prefill_leg(body, rules)
        legs.without_prompt_scores(body, rules)
    assert orjson.dumps(body) == before


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"text"', b"1", b"null", b'{"a": "\\ud800"}', b'{"a": NaN}', b"\xff"]
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(legs.Refused):
        legs.parse(raw)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"n": 0}, "n"),
        ("/v1/completions", {"n": "2"}, "n"),
        ("/v1/completions", {"n": 1.5}, "n"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"use_beam_search": True}, "best_of"),
        ("/v1/completions", {"echo": "yes"}, "echo"),
        ("/v1/completions", {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/responses", {"background": True}, "background"),
        ("/inference/v1/generate", {"sampling_params": {"n": -1}}, "n"),
        ("/inference/v1/generate", {"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ("/inference/v1/generate", {"sampling_params": [1]}, "sampling_params"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    with pytest.raises(legs.Refused) as caught:
        legs.check(body, legs.RULES[path])
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2, 3]]])
def test_one_prompt_in_any_spelling_is_taken(prompt: object) -> None:
    body = {"prompt": prompt, "n": 1, "echo": False, "prompt_logprobs": None}
    legs.check(body, legs.COMPLETIONS)
    assert [part.body for part in parts(body, legs.COMPLETIONS)] == [body]


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"kv_transfer_params": "x"},
        [],
        {"kv_transfer_params": {"do_remote_prefill": False}},
    ],
)
def test_an_answer_without_a_ticket_gives_none(answer: object) -> None:
    assert Ticket.from_answer(answer, 1.0) is None


def test_a_ticket_for_a_prompt_without_blocks_is_a_ticket() -> None:
    ticket = Ticket.from_answer({"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": []}}, 1.0)
    assert ticket == Ticket({"do_remote_prefill": True, "remote_block_ids": []}, 1.0)


@pytest.mark.parametrize(
    ("path", "body", "leg"),
    [
        (
            "/v1/responses",
            {"input": "a", "max_output_tokens": 9, "stream": True, "stop": ["x"], "include": ["logprobs"]},
            {"input": "a", "max_output_tokens": 1, "stream": False, "ignore_eos": True, "store": False},
        ),
        (
            "/v1/messages",
            {"messages": [], "max_tokens": 9, "stream": True, "stop_sequences": ["x"], "thinking": {"type": "enabled"}},
            {"messages": [], "max_tokens": 1, "stream": False, "thinking": {"type": "enabled"}},
        ),
        (
            "/inference/v1/generate",
            {
                "token_ids": [1, 2],
                "stream": True,
                "stream_options": {},
                "sampling_params": {"max_tokens": 9, "min_tokens": 5, "n": 1, "stop": "x", "temperature": 0},
            },
            {
                "token_ids": [1, 2],
                "stream": False,
                "sampling_params": {"max_tokens": 1, "temperature": 0, "ignore_eos": True},
            },
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1]},
            {"token_ids": [1], "stream": False, "sampling_params": {"max_tokens": 1, "ignore_eos": True}},
        ),
    ],
)
def test_every_endpoint_has_its_own_names_for_one_token(
    path: str, body: dict[str, object], leg: dict[str, object]
) -> None:
    made = legs.prefill_leg(body, legs.RULES[path])
    del made["kv_transfer_params"]
    assert made == leg


RAW = b' { "model" : "m","prompt":"\\u00e9 1e400", "max_tokens" : 5 , "temperature": 1.10 }'


def test_the_decode_legs_bytes_are_the_clients_to_the_letter() -> None:
    assert b"".join(legs.decode_body(legs.parse(RAW)[1], None)) == RAW
    made = b"".join(legs.decode_body(legs.parse(RAW)[1], TICKET))
    assert made.endswith(RAW[RAW.index(b"{") + 1 :])
    assert orjson.loads(made) == {**orjson.loads(RAW), "kv_transfer_params": dict(TICKET.params)}


@pytest.mark.parametrize("raw", [b"{}", b"{ }", b" {\n}"])
def test_an_empty_body_takes_a_ticket_too(raw: bytes) -> None:
    assert decoded(raw, TICKET) == {"kv_transfer_params": dict(TICKET.params)}


SCORES = [
    ("/v1/completions", {"echo": True, "logprobs": 0}, True),
    ("/v1/completions", {"echo": True}, False),
    ("/v1/completions", {"logprobs": 2}, False),
    ("/v1/completions", {"prompt_logprobs": 0}, True),
    ("/v1/chat/completions", {"prompt_logprobs": 3}, True),
    ("/v1/chat/completions", {"echo": True, "logprobs": True}, False),
    ("/inference/v1/generate", {"sampling_params": {"prompt_logprobs": 1}}, True),
    ("/inference/v1/generate", {"sampling_params": {}}, False),
]


@pytest.mark.parametrize(("path", "body", "asked"), SCORES)
def test_scores_of_the_prompt_are_asked_of_prefill_alone(path: str, body: dict[str, Any], asked: bool) -> None:
    rules = legs.RULES[path]
    legs.check(body, rules)
    assert legs.asks_prompt_scores(body, rules) is asked
    prefill = legs.fields_of(legs.prefill_leg(body, rules), rules)
    if asked:
        for name, value in legs.fields_of(body, rules).items():
            assert prefill[name] == value
        kept = legs.fields_of(legs.without_prompt_scores(body, rules), rules)
        assert "echo" not in kept and "prompt_logprobs" not in kept
        assert kept.get("logprobs") == body.get("logprobs")
    else:
        assert "echo" not in prefill and "logprobs" not in prefill


@pytest.mark.parametrize(
    ("body", "nothing"),
    [
        ({"echo": True, "max_tokens": 0}, True),
        ({"echo": True, "max_tokens": 1}, False),
        ({"echo": True}, False),
        ({"max_tokens": 0}, False),
    ],
)
def test_a_prompt_alone_needs_no_decode(body: dict[str, Any], nothing: bool) -> None:
    assert legs.generates_nothing(body, legs.COMPLETIONS) is nothing
    assert not legs.generates_nothing(body, legs.CHAT)


def long(**fields: Any) -> bytes:
    return orjson.dumps({"prompt": 'caf\u00e9 \\ " ' * 5000, "max_tokens": 5, **fields})


def test_a_long_body_means_the_same_and_its_long_values_are_not_read() -> None:
    raw = long(messages=[{"content": "x" * 9000}], stop=["a"], n=1, stream=True, temperature=0.5)
    body, kept = legs.parse(raw)
    assert kept == raw
    assert isinstance(body["prompt"], orjson.Fragment) and isinstance(body["messages"], orjson.Fragment)
    made, same = (orjson.loads(orjson.dumps(legs.prefill_leg(each))) for each in (body, orjson.loads(raw)))
    assert made == same
    assert decoded(raw, TICKET) == {**orjson.loads(raw), "kv_transfer_params": dict(TICKET.params)}


@pytest.mark.parametrize(
    "said", [{"kv_transfer_params": {"a": "evil"}}, {"vllm_xargs": {"kv_transfer_params": "evil"}}]
)
def test_a_long_body_hides_nothing(said: dict[str, Any]) -> None:
    for raw in (
        long(**said),
        long(**said, pad="x" * 5000),
        long(**{**said, "vllm_xargs": {"kv_transfer_params": "evil" * 5000}}),
    ):
        body, kept = legs.parse(raw)
        assert b"evil" not in kept + orjson.dumps(legs.prefill_leg(body))
        assert orjson.loads(kept)["prompt"] == orjson.loads(raw)["prompt"]


@pytest.mark.parametrize("prompt", [["a" * 9000, "b"], [[1, 2] * 4000, [3]], [7] * 9000])
def test_a_long_list_of_prompts_is_read(prompt: list[Any]) -> None:
    body, _ = legs.parse(long(prompt=prompt))
    assert body["prompt"] == prompt


@pytest.mark.parametrize(
    "raw",
    [
        long()[:-1],
        long() + b"x",
        b"[" + long() + b"]",
        b'"' + b"x" * 20_000 + b'"',
        long().replace(b"caf", b"\xff", 1),
        long().replace(b"caf", b"\\ud800", 1),
        long().replace(b"caf", b"\\uDc00\\ud800", 1),
        long().replace(b"caf", b"\\ud800\\u0041", 1),
        long().replace(b"caf", b"\n", 1),
        long().replace(b"caf", b"\\x", 1),
        long(x=1).replace(b'"x":1', b'"x":NaN'),
        b'{"a":' * 20_000,
    ],
)
def test_a_long_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(legs.Refused):
        legs.parse(raw)


def test_of_two_equal_names_the_last_counts_in_a_long_body_too() -> None:
    raw = long()[:-1] + b',"max_tokens":6,"prompt":"' + b"z" * 5000 + b'"}'
    body, _ = legs.parse(raw)
    assert (body["max_tokens"], orjson.loads(orjson.dumps(body["prompt"]))) == (6, "z" * 5000)
