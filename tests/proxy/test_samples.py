from __future__ import annotations

from typing import Any

import pytest

from baton.proxy import legs
from baton.proxy.samples import MOST, Part, Weaver, joined, parts, summed


def made(body: dict[str, Any], path: str = "/v1/completions") -> list[Part]:
    return parts(body, legs.RULES[path])


def test_prompts_and_samples_are_numbered_prompt_by_prompt() -> None:
    assert [(each.index, each.prompt, each.body["prompt"]) for each in made({"prompt": ["a", "b"], "n": 2})] == [
        (0, 0, "a"),
        (1, 0, "a"),
        (2, 1, "b"),
        (3, 1, "b"),
    ]


@pytest.mark.parametrize("prompt", ["a", ["a"], [1, 2], [[1, 2]], None])
def test_one_prompt_is_one_request_as_it_came(prompt: Any) -> None:
    body = {"prompt": prompt, "n": None}
    assert made(body) == [Part(0, 0, body)]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("n", [2, "x", 0])
def test_n_is_nothing_where_the_api_has_no_such_field(path: str, n: Any) -> None:
    body = {"input": "a", "messages": [], "n": n}
    legs.check(body, legs.RULES[path])
    assert made(body, path) == [Part(0, 0, body)]


def test_token_ids_of_several_prompts_are_several() -> None:
    assert [each.body["prompt"] for each in made({"prompt": [[1, 2], [3]]})] == [[1, 2], [3]]


def test_no_part_asks_for_samples_and_a_seed_is_counted_up() -> None:
    bodies = [each.body for each in made({"prompt": "a", "n": 3, "seed": 7})]
    assert bodies == [{"prompt": "a", "seed": 7}, {"prompt": "a", "seed": 8}, {"prompt": "a", "seed": 9}]
    assert [each.body for each in made({"messages": [], "n": 2}, "/v1/chat/completions")] == [{"messages": []}] * 2
    nested = made({"token_ids": [1], "sampling_params": {"n": 2, "seed": 1}}, "/inference/v1/generate")
    assert [each.body for each in nested] == [
        {"token_ids": [1], "sampling_params": {"seed": 1}},
        {"token_ids": [1], "sampling_params": {"seed": 2}},
    ]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [{}, {}]}, "prompt"),
        ({"prompt": ["a", "b"], "prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt": "a", "n": MOST + 1}, "n"),
        ({"prompt": ["a"] * (MOST + 1)}, "prompt"),
    ],
)
def test_what_cannot_be_cut_is_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(legs.Refused) as caught:
        made(body)
    assert caught.value.param == param


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def test_usage_counts_each_prompt_once_and_every_answer() -> None:
    places = made({"prompt": ["a", "b"], "n": 2})
    each = [usage(3, 5, 1), usage(3, 6, 3), usage(10, 7, 4), usage(10, 8, 10)]
    assert summed(list(zip(each, places, strict=True))) == {
        "prompt_tokens": 13,
        "completion_tokens": 26,
        "total_tokens": 39,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert summed([(None, places[0])]) is None


def test_answers_are_joined_in_order_under_the_first_ones_name() -> None:
    places = made({"prompt": ["a", "b"]})
    answers = [
        {"id": f"x{place}", "choices": [{"index": 0, "text": text}], "usage": usage(2, 1)}
        for place, text in enumerate("ab")
    ]
    assert joined(answers, places) == {
        "id": "x0",
        "choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}],
        "usage": {**usage(4, 2)},
    }


def test_streams_are_woven_into_one() -> None:
    weaver = Weaver(made({"prompt": ["a", "b"]}))
    assert weaver.event(1, {"id": "x1", "created": 5, "choices": [{"index": 0, "text": "B"}]}) == {
        "id": "x1",
        "created": 5,
        "choices": [{"index": 1, "text": "B"}],
    }
    assert weaver.event(0, {"id": "x0", "created": 6, "choices": [{"index": 0, "text": "A"}]}) == {
        "id": "x1",
        "created": 5,
        "choices": [{"index": 0, "text": "A"}],
    }
    assert weaver.usage() is None
    for place in (0, 1):
        assert weaver.event(place, {"id": "x", "choices": [], "usage": usage(2, 3)}) is None
    whole = weaver.usage()
    assert whole is not None
    assert (whole["id"], whole["choices"], whole["usage"]["total_tokens"]) == ("x1", [], 10)
