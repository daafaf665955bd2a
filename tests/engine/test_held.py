"""What an engine holds for readers: only what is still held, for that prompt, block for block, may be used."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.engine.held import MARK, YES, Claim, Held, digest, question

TOKENS = list(range(70))
BLOCKS = ([4, 9, 2],)


def held() -> Held:
    made = Held()
    made.keep("r", BLOCKS, TOKENS, "lora\0salt")
    return made


def claim(request_id: str = "r", blocks: object = BLOCKS, count: int = 70, tokens: object = None) -> Claim:
    said = digest(TOKENS[:count], "lora\0salt") if tokens is None else digest(tokens, "lora\0salt")  # type: ignore[arg-type]
    return Claim(request_id, [list(group) for group in blocks], count, said)  # type: ignore[attr-defined]


def test_what_is_held_may_be_used_whole_or_up_to_a_prefix() -> None:
    assert held().problem(claim()) is None
    assert held().problem(claim(blocks=([4, 9],), count=64)) is None
    assert held().answer(question(claim())) == YES


def test_what_was_released_may_not() -> None:
    made = held()
    made.release("r")
    made.release("unknown")
    assert made.problem(claim()) == "nothing is held for that request (any more)"
    assert made.answer(question(claim())) == MARK + b"nothing is held for that request (any more)"


@pytest.mark.parametrize("blocks", [([9, 4, 2],), ([4, 9, 2, 7],), ([4, 9, 3],), ([4, 9, 2], [1]), ()], ids=str)
def test_other_blocks_or_another_order_may_not(blocks: object) -> None:
    assert held().problem(claim(blocks=blocks)) == "those are not the blocks of that request"


def test_another_prompt_may_not() -> None:
    assert held().problem(claim(tokens=[*TOKENS[:-1], 5])) == "they hold another prompt"
    assert held().problem(Claim("r", [[4, 9, 2]], 70, digest(TOKENS, "another\0salt"))) == "they hold another prompt"
    assert held().problem(claim(count=71)) == "they hold 70 tokens, not 71"


def test_what_cannot_be_compared_is_held_to_its_blocks() -> None:
    made = Held()
    made.keep("r", BLOCKS, TOKENS, None)
    assert made.problem(claim(tokens=[1])) is None
    assert held().problem(Claim("r", [[4, 9, 2]], 70, None)) is None


@given(st.binary(max_size=60))
def test_no_question_is_too_much(raw: bytes) -> None:
    assert held().answer(MARK + raw).startswith(MARK)


@given(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=6))
def test_no_readable_question_is_too_much(value: object) -> None:
    try:
        raw = msgspec.msgpack.encode(value)
    except OverflowError:
        return
    assert held().answer(MARK + raw) != YES
