"""Tickets: what an engine refuses at its door, and how much two turns have in common."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.sim.text import contents_of, tokens_of
from baton.sim.tickets import base_id, common_blocks, digests, problem

GOOD: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2]],
    "remote_host": "h",
    "remote_port": 5559,
    "tp_size": 1,
}


def test_a_good_ticket_is_good_in_both_modes() -> None:
    assert problem(GOOD, push=False) is None
    assert problem(GOOD, push=True) is None
    assert problem({"do_remote_decode": True, "remote_engine_id": None}, push=False) is None


@pytest.mark.parametrize(
    ("change", "push", "says"),
    [
        ({"remote_engine_id": ["e"]}, False, "remote_engine_id is not a text"),
        ({"remote_port": "5559"}, False, "remote_port is not a port number"),
        ({"remote_block_ids": [1]}, False, "not a list of lists"),
        ({"remote_block_ids": [["x"]]}, False, "not a list of lists"),
        ({"do_remote_prefill": 1}, False, "not true or false"),
        ({"do_remote_decode": True}, False, "both"),
        ({"remote_request_id": None}, False, "lacks remote_request_id"),
        ({"tp_size": None}, True, "lacks tp_size"),
    ],
)
def test_a_bad_one_is_told_by_its_key(change: dict[str, Any], push: bool, says: str) -> None:
    assert says in (problem({**GOOD, **change}, push=push) or "")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists))
def test_whatever_a_key_holds_the_answer_is_a_sentence_or_nothing(value: Any) -> None:
    for key in GOOD:
        assert isinstance(problem({**GOOD, key: value}, push=False), str | None)


def test_two_legs_have_their_id_in_common_but_for_its_random_end() -> None:
    assert base_id("cmpl-7-0-0123abcd") == base_id("cmpl-7-0-ffff0000") == "cmpl-7-0"


def test_turns_have_their_common_start_in_common_and_no_more() -> None:
    kept = tokens_of("one two three four five six seven eight")
    longer, edited = kept + tokens_of("nine"), tokens_of("one two 333") + kept[12:]
    ticket = digests(contents_of(kept, 2), 2, len(kept) // 4)
    assert common_blocks(ticket, contents_of(longer, 2), 2) == len(kept) // 4 // 2
    assert common_blocks(ticket, contents_of(edited, 2), 2) == 1
    assert common_blocks(ticket, contents_of(longer, 4), 4) == 0
    assert common_blocks({**ticket, "block_digests": "?"}, contents_of(longer, 2), 2) == 0
