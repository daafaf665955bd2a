"""What a ticket may hold: what vLLM gives passes, what would end the engine is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.tickets import problem

ASK: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PULL: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5559,
    "tp_size": 1,
    "remote_num_tokens": 40,
    "remote_blocks_expiry_time": None,
    "transfer_mode": "pull",
}
PUSH = {key: PULL[key] for key in ("do_remote_prefill", "remote_engine_id", "remote_host", "remote_port", "tp_size")}
TURN = {**PULL, "do_remote_prefill": False, "do_remote_decode": True, "remote_blocks_expiry_time": 12.5}


@pytest.mark.parametrize(
    ("ticket", "push"),
    [(ASK, False), (ASK, True), (PULL, False), (PUSH, True), (TURN, False), ({}, False), ({"unknown": {"a": 1}}, True)],
)
def test_what_engines_and_proxies_send_passes(ticket: dict[str, Any], push: bool) -> None:
    assert problem(ticket, push=push) is None


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "remote_port", "remote_request_id"])
def test_a_pull_without_one_of_its_keys_is_refused(key: str) -> None:
    for ticket in (PULL, TURN):
        assert problem({**ticket, key: None}, push=False) == f"kv_transfer_params lacks {key}"
        without = {name: value for name, value in ticket.items() if name != key}
        assert problem(without, push=False) == f"kv_transfer_params lacks {key}"


def test_a_pull_without_blocks_is_refused() -> None:
    assert problem({**PULL, "remote_block_ids": []}, push=False) == "kv_transfer_params lacks remote_block_ids"


@pytest.mark.parametrize("key", ["remote_engine_id", "remote_host", "remote_port", "tp_size"])
def test_a_push_without_one_of_its_keys_is_refused(key: str) -> None:
    assert problem({**PUSH, key: None}, push=True) == f"kv_transfer_params lacks {key}"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("remote_port", 0, "a port number"),
        ("remote_port", "5559", "a port number"),
        ("remote_port", True, "a port number"),
        ("tp_size", 0, "a whole number from 1"),
        ("tp_size", 1.5, "a whole number from 1"),
        ("remote_num_tokens", -1, "a whole number of 0 or more"),
        ("remote_block_ids", [1, 2], "a list of lists"),
        ("remote_block_ids", [[1, -2]], "a list of lists"),
        ("remote_block_ids", [["1"]], "a list of lists"),
        ("remote_block_ids", "x", "a list of lists"),
        ("remote_host", ["a"], "a text"),
        ("do_remote_prefill", "yes", "true or false"),
        ("remote_blocks_expiry_time", "soon", "a number"),
        ("_common_tokens", 400, "a key of a ticket"),
    ],
)
def test_a_wrong_value_is_named(key: str, value: object, said: str) -> None:
    wrong = problem({**PULL, key: value}, push=False)
    assert wrong is not None
    assert wrong.startswith(f"kv_transfer_params.{key} is not {said}")


@pytest.mark.parametrize("ticket", [None, [], "x", 5, True])
def test_what_is_no_object_is_no_ticket(ticket: object) -> None:
    assert "not an object" in (problem(ticket, push=False) or "")


def test_both_directions_at_once_are_refused() -> None:
    assert "both" in (problem({**PULL, "do_remote_decode": True}, push=False) or "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*PULL, "x"]), JSON), st.booleans())
def test_whatever_passes_has_what_the_connector_reads(ticket: dict[str, Any], push: bool) -> None:
    if problem(ticket, push=push) is not None or not ticket.get("do_remote_prefill"):
        return
    assert isinstance(ticket["remote_engine_id"], str)
    assert isinstance(ticket["remote_host"], str)
    assert 0 < ticket["remote_port"] < 65536
    if push:
        assert ticket["tp_size"] >= 1
    else:
        assert isinstance(ticket["remote_request_id"], str)
        assert all(block >= 0 for group in ticket["remote_block_ids"] for block in group)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("remote_host", "a" * 2000, "is not a text of at most 1024 characters"),
        ("remote_host", "a\0b", "is not a text of at most 1024 characters"),
        ("remote_request_id", "\ud800", "is not a text of at most 1024 characters"),
        ("remote_blocks_expiry_time", 10**400, "is not a number"),
        ("remote_blocks_expiry_time", float("nan"), "is not a number"),
        ("remote_block_ids", [[1 << 31]], "is not a list of lists of block numbers"),
        ("tp_size", 0, "is not a whole number from 1 to 65536"),
        ("tp_size", None, "is null"),
        ("pp_size", None, "is null"),
        ("block_digests", "\u00e9", "is not a text in base64"),
        ("remote_block_size", -1, "is not a whole number of 0 or more"),
    ],
)
def test_values_that_would_break_something_later_are_named(key: str, value: Any, said: str) -> None:
    assert problem({**PULL, key: value}, push=False) == f"kv_transfer_params.{key} {said}"


@pytest.mark.parametrize("own", ["e", "e_dp3"])
def test_an_engine_does_not_read_from_itself(own: str) -> None:
    for named in ("e", "e_dp0"):
        ticket = {**PULL, "remote_engine_id": named}
        said = "kv_transfer_params.remote_engine_id is this engine itself"
        assert problem(ticket, push=False, engine_id=own) == said
    assert problem(PULL, push=False, engine_id="another") is None
    assert problem(ASK, push=False, engine_id=own) is None


def nested(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = {"a": [made]}
    return made


@pytest.mark.parametrize("value", [nested(5), nested(400), 1 << 70, -(1 << 64), ["\ud800"], {"\udfff": 1}])
def test_an_unknown_key_holds_nothing_that_cannot_be_sent_on(value: Any) -> None:
    said = "kv_transfer_params.'later' is nested too deeply, or holds what has no place in a message"
    assert problem({**PULL, "later": value}, push=False) == said


@pytest.mark.parametrize("value", [None, 1, -1, 1.5, "\u20ac", [[1, "a"]], {"a": {"b": [None]}}, (1 << 64) - 1])
def test_an_unknown_key_that_can_be_passes(value: Any) -> None:
    assert problem({**PULL, "later": value}, push=False) is None
