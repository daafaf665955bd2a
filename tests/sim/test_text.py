"""What fake engines compute: tokens, block contents, answers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.sim.text import (
    LEAST_TOKENS,
    MOST_TOKENS,
    Sampling,
    answer_of,
    contents_of,
    count_of,
    expected,
    ids_of,
    most_tokens,
    tokens_of,
    tokens_of_ids,
)

PROMPT = tokens_of("the quick brown fox jumps over the lazy dog, again and again")


def test_a_text_and_the_ids_of_its_tokens_are_the_same_prompt() -> None:
    assert tokens_of_ids(ids_of(PROMPT)) == PROMPT
    assert count_of(tokens_of("12345")) == 2


def test_an_answer_is_the_same_each_time_and_another_for_another_prompt() -> None:
    sampling = Sampling(cap=20, ignore_eos=True)
    assert expected(PROMPT, sampling, 4) == expected(PROMPT, sampling, 4)
    assert expected(PROMPT, sampling, 4) != expected(tokens_of("something else"), sampling, 4)


def test_one_altered_block_anywhere_alters_the_answer() -> None:
    sampling = Sampling(cap=20, ignore_eos=True)
    contents = contents_of(PROMPT, 2)
    right = answer_of(contents, sampling)
    for place in range(len(contents)):
        altered = [*contents[:place], b"x" * 16, *contents[place + 1 :]]
        assert answer_of(altered, sampling) != right


def test_a_block_depends_on_all_before_it() -> None:
    one, other = contents_of(tokens_of("aaaabbbb"), 1), contents_of(tokens_of("ccccbbbb"), 1)
    assert one[1] != other[1]


def test_blocks_of_a_prompt_are_those_of_its_longer_next_turn() -> None:
    assert (
        contents_of(PROMPT + tokens_of("more"), 4)[: count_of(PROMPT) // 4]
        == contents_of(PROMPT, 4)[: count_of(PROMPT) // 4]
    )


@given(cap=st.integers(1, 300), least=st.integers(0, 300), eos=st.booleans())
def test_an_answer_has_no_more_tokens_than_allowed_and_no_fewer_than_asked_for(cap: int, least: int, eos: bool) -> None:
    least = min(least, cap)
    sampling = Sampling(cap, least, eos)
    text = expected(PROMPT, sampling, 16)
    assert max(least, 1) <= len(text.tokens) <= most_tokens(sampling) <= cap
    assert text.finish == ("length" if len(text.tokens) == cap else "stop")
    if eos:
        assert len(text.tokens) == cap


def test_without_a_cap_an_answer_ends_by_itself() -> None:
    text = expected(PROMPT, Sampling(10_000), 16)
    assert LEAST_TOKENS <= len(text.tokens) <= MOST_TOKENS
    assert text.finish == "stop"


def test_a_stop_text_ends_the_answer_and_is_no_part_of_it() -> None:
    whole = expected(PROMPT, Sampling(30, ignore_eos=True), 16)
    stop = whole.tokens[5][1:] + whole.tokens[6][:2]
    cut = expected(PROMPT, Sampling(30, ignore_eos=True, stop=(stop,)), 16)
    assert (cut.finish, cut.stop) == ("stop", stop)
    assert cut.text == whole.text[: whole.text.find(stop)]
