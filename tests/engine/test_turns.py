"""Turns are compared by their tokens: what is pulled is what both have, never more."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.turns import common_tokens, digests

BLOCK = 4
KEPT = list(range(100, 110))
"""Two full blocks and a tail of two tokens."""


def ticket(tokens: list[int] = KEPT, salt: str = "") -> dict[str, Any]:
    return {"remote_num_tokens": len(tokens), **digests(tokens, BLOCK, salt)}


@pytest.mark.parametrize(
    ("prompt", "common"),
    [
        ([*KEPT, 1, 2, 3], 10),  # goes on where the turn ended
        (KEPT, 10),
        (KEPT[:9], 8),  # the tail is not all there
        ([*KEPT[:9], 7, 7, 7], 8),  # the tail differs
        ([*KEPT[:5], 7, *KEPT[6:], 1, 2], 4),  # an edit in the second block
        ([7, *KEPT[1:], 1, 2], 0),  # an edit at the very start
        (KEPT[:7], 4),
        (KEPT[:3], 0),
        ([], 0),
        ([*KEPT[:4], *KEPT[5:], 1, 2], 4),  # one token taken out: all behind it has moved
    ],
)
def test_what_is_common_is_the_equal_start(prompt: list[int], common: int) -> None:
    assert common_tokens(ticket(), prompt, BLOCK, "") == common


def test_equal_blocks_behind_a_difference_do_not_count() -> None:
    """Each block's digest is over everything before it too: its KV cache depends on that."""
    assert common_tokens(ticket(), [1, 1, 1, 1, *KEPT[4:]], BLOCK, "") == 0


def test_another_salt_has_nothing_in_common() -> None:
    assert common_tokens(ticket(salt="tenant a"), KEPT, BLOCK, "tenant b") == 0
    assert common_tokens(ticket(salt="tenant a"), KEPT, BLOCK, "tenant a") == 10


def test_whole_blocks_need_no_tail() -> None:
    assert ticket(KEPT[:8])["tail_digest"] == ""
    assert common_tokens(ticket(KEPT[:8]), KEPT, BLOCK, "") == 8


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 8},
        {"block_size": None},
        {"block_digests": None},
        {"block_digests": "not base64!"},
        {"block_digests": ""},
        {"remote_num_tokens": None},
        {"remote_num_tokens": -5},
        {"remote_num_tokens": True},
        {"tail_digest": "%%"},
    ],
)
def test_a_ticket_that_nobody_can_vouch_for_offers_nothing(change: dict[str, Any]) -> None:
    assert common_tokens({**ticket(), **change}, KEPT, BLOCK, "") == 0


def test_a_count_beyond_the_digests_is_cut_to_them() -> None:
    assert common_tokens({**ticket(), "remote_num_tokens": 400}, KEPT * 40, BLOCK, "") == 8
