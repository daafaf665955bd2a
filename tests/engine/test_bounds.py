"""How long the two sides of a push wait for each other."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine import PushBounds


def read(**given: Any) -> PushBounds:
    return PushBounds.read(given.get)


def test_bounds_are_defaults_or_what_is_given() -> None:
    assert read() == PushBounds(30.0, 10.0)
    assert read(push_answer_seconds=8, push_stall_seconds=3) == PushBounds(8.0, 3.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"push_stall_seconds": "3"}, "push_stall_seconds '3' is not a number of seconds above 0"),
        ({"push_answer_seconds": True}, "push_answer_seconds True is not"),
        ({"push_answer_seconds": 0}, "push_answer_seconds 0 is not"),
        ({"push_answer_seconds": 15}, "push_answer_seconds 15 must be twice push_stall_seconds 10 or more"),
    ],
)
def test_bounds_by_which_blocks_could_be_given_away_too_early_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(**given)
