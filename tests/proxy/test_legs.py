from __future__ import annotations

import orjson
import pytest

from baton.proxy import legs
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
    assert legs.decode_leg({"prompt": "a", null: None}, None) == {"prompt": "a", null: None}


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


def test_decode_leg_is_the_clients_body_and_the_ticket() -> None:
    body = {"prompt": "a", "max_tokens": 7, "min_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    assert legs.decode_leg(body, TICKET) == {
        **body,
        "kv_transfer_params": {"do_remote_prefill": True, "remote_engine_id": "e1", "future_key": [1]},
    }


def test_a_clients_ticket_reaches_no_engine() -> None:
    body = {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "evil"}}
    assert "evil" not in str(legs.prefill_leg(body))
    assert legs.decode_leg(body, None) == {"prompt": "a"}
    assert "evil" not in str(legs.decode_leg(body, TICKET))


def test_legs_leave_the_clients_body_alone() -> None:
    body = {"prompt": "a", "max_tokens": 7}
    legs.prefill_leg(body)
    legs.decode_leg(body, TICKET)
    assert body == {"prompt": "a", "max_tokens": 7}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ("text", None),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "use_beam_search": True}, "best_of"),
    ],
)
def test_what_one_ticket_cannot_carry_is_refused(body: object, param: str | None) -> None:
    with pytest.raises(legs.Refused) as caught:
        legs.check(body)
    assert caught.value.param == param


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2, 3], [[1, 2, 3]]])
def test_one_prompt_in_any_spelling_is_taken(prompt: object) -> None:
    body = {"prompt": prompt, "n": 1, "echo": False, "prompt_logprobs": None}
    assert legs.check(body) == body


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


@pytest.mark.parametrize("path", legs.RULES)
def test_no_endpoint_lets_a_clients_ticket_through(path: str) -> None:
    body = {"max_tokens": 5, "kv_transfer_params": {"remote_host": "evil"}}
    assert "evil" not in str(legs.prefill_leg(body, legs.RULES[path]))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"background": True}, "background"),
        ("/inference/v1/generate", {"sampling_params": {"n": 2}}, "n"),
        ("/inference/v1/generate", {"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ("/inference/v1/generate", {"sampling_params": [1]}, "sampling_params"),
    ],
)
def test_each_endpoint_refuses_what_its_ticket_cannot_carry(path: str, body: object, param: str) -> None:
    with pytest.raises(legs.Refused) as caught:
        legs.check(body, legs.RULES[path])
    assert caught.value.param == param


RAW = b' { "model" : "m","prompt":"\\u00e9 1e400", "max_tokens" : 5 , "temperature": 1.10 }'


def test_the_decode_legs_bytes_are_the_clients_to_the_letter() -> None:
    body = orjson.loads(RAW)
    assert legs.decode_bytes(RAW, body, None) == RAW
    made = legs.decode_bytes(RAW, body, TICKET)
    assert made.endswith(RAW[RAW.index(b"{") + 1 :])
    assert orjson.loads(made) == legs.decode_leg(body, TICKET)


@pytest.mark.parametrize(
    "raw", [b"{}", b'{"kv_transfer_params": 1, "prompt": "a"}', b'{"kv_transfer\\u005fparams": {"a": 1}}']
)
def test_bytes_with_a_clients_ticket_are_written_anew(raw: bytes) -> None:
    made = orjson.loads(legs.decode_bytes(raw, orjson.loads(raw), TICKET))
    assert made == legs.decode_leg(orjson.loads(raw), TICKET)
    assert b"u005f" not in legs.decode_bytes(raw, orjson.loads(raw), TICKET)
