"""The sizes of steps: defaults, look-up, and every way to get them wrong."""

from __future__ import annotations

from typing import Any

import pytest

from baton.engine.static.buckets import (
    Sampling,
    StaticShapes,
    TooLarge,
    asked_for,
    may_be_padded,
    powers_of_two,
    problems,
    resolve,
    smallest,
)

FITS: dict[str, Any] = {"max_tokens": 512, "max_seqs": 8, "max_len": 4096}


def test_defaults_are_powers_of_two_up_to_what_vllm_may_do() -> None:
    shapes = resolve({}, max_tokens=1000, max_seqs=6, max_len=2000)
    assert shapes.tokens == (32, 64, 128, 256, 512, 1000)
    assert shapes.seqs == (1, 2, 4, 6)
    assert shapes.max_consecutive_prefill_steps == 4
    assert shapes.sampling == Sampling(all_greedy=False, max_top_k=256)


def test_a_maximum_below_the_first_bucket_is_the_only_one() -> None:
    assert powers_of_two(32, 16) == (16,)
    assert powers_of_two(1, 1) == (1,)


def test_no_prefill_step_is_longer_than_a_prompt_may_be() -> None:
    assert resolve({}, max_tokens=2048, max_seqs=4, max_len=100).tokens == (32, 64, 100)
    with pytest.raises(ValueError, match=r"ends with 2048 and --max-model-len is 100: the last bucket must be 100"):
        resolve({"num_batched_tokens_buckets": [2048]}, max_tokens=2048, max_seqs=4, max_len=100)


def test_a_given_list_is_taken_as_it_is() -> None:
    shapes = resolve({"num_batched_tokens_buckets": [100, 512], "num_seqs_buckets": [8]}, **FITS)
    assert (shapes.tokens, shapes.seqs) == ((100, 512), (8,))


def test_a_step_takes_the_smallest_bucket_that_it_fits_in() -> None:
    assert [smallest(size, (4, 8, 32)) for size in (1, 4, 5, 8, 9, 32)] == [4, 4, 8, 8, 32, 32]


def test_a_bucket_next_to_a_smaller_one_is_never_padded() -> None:
    shapes = StaticShapes(tokens=(6, 32), seqs=(1, 2, 4, 5, 6))
    assert [may_be_padded(rows, shapes) for rows in (1, 2, 4, 5, 6, 32)] == [False, False, True, False, True, True]


def test_a_step_above_the_largest_bucket_is_refused_with_both_sizes() -> None:
    with pytest.raises(TooLarge, match=r"a decode step of 33 is larger than the largest bucket, 32"):
        smallest(33, (4, 32), "a decode step")


@pytest.mark.parametrize(
    "config", [{"static_shapes": True}, {"num_seqs_buckets": [8]}, {"num_batched_tokens_buckets": []}]
)
def test_buckets_or_the_switch_choose_static_shapes(config: dict[str, Any]) -> None:
    assert asked_for(config)


@pytest.mark.parametrize("config", [{}, {"static_shapes": False}, {"mlp_dp_size": 2}, {"num_seqs_buckets": None}])
def test_nothing_else_does(config: dict[str, Any]) -> None:
    assert not asked_for(config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_seqs_buckets": 8}, "num_seqs_buckets is 8: it must be a list of numbers, such as [8]"),
        ({"num_seqs_buckets": []}, "num_seqs_buckets is empty: give at least one bucket, or leave it out"),
        ({"num_seqs_buckets": [0, 8]}, "num_seqs_buckets[0] is 0: it must be a whole number of 1 or more"),
        ({"num_seqs_buckets": [True, 8]}, "num_seqs_buckets[0] is True: it must be a whole number of 1 or more"),
        ({"num_seqs_buckets": [1.5, 8]}, "num_seqs_buckets[0] is 1.5: it must be a whole number of 1 or more"),
        ({"num_seqs_buckets": [4, 4, 8]}, "num_seqs_buckets[1] is 4 after 4: buckets must ascend, each once"),
        (
            {"num_seqs_buckets": [1, 4]},
            "num_seqs_buckets ends with 4 and --max-num-seqs is 8: the last bucket must be 8; change either of them",
        ),
        (
            {"num_batched_tokens_buckets": [128, 1024]},
            "num_batched_tokens_buckets ends with 1024 and --max-num-batched-tokens is 512: "
            "the last bucket must be 512; change either of them",
        ),
        (
            {"max_consecutive_prefill_steps": 0},
            "max_consecutive_prefill_steps is 0: it must be a whole number of 1 or more (default 4)",
        ),
        ({"static_shapes": "on"}, "static_shapes is 'on': it must be true or false"),
        (
            {"static_shapes": False, "num_seqs_buckets": [8]},
            "static_shapes is false, and buckets are given: drop one of them",
        ),
        (
            {"on_device_sampling_config": []},
            "on_device_sampling_config is []: it must be an object, or null to sample outside the graph",
        ),
        (
            {"on_device_sampling_config": {"all_greedy": "maybe", "max_top_k": 0}},
            "on_device_sampling_config.all_greedy is 'maybe': it must be true or false; "
            "on_device_sampling_config.max_top_k is 0: it must be a whole number of 1 or more",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_value_and_remedy(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as error:
        resolve(config, **FITS)
    assert str(error.value) == words


def test_all_problems_are_told_at_once() -> None:
    config = {"num_batched_tokens_buckets": [64, 32], "num_seqs_buckets": [], "max_consecutive_prefill_steps": -1}
    assert len(problems(config, **FITS)) == 4  # the order and the end of the first, and one of each other


def test_what_is_not_known_yet_is_not_compared() -> None:
    assert problems({"num_seqs_buckets": [3]}) == []


def test_the_largest_decode_step_must_fit_with_its_drafts() -> None:
    with pytest.raises(
        ValueError, match=r"--max-num-seqs is 64 times 4 tokens each and --max-num-batched-tokens is 128"
    ):
        resolve({}, max_tokens=128, max_seqs=64, max_len=4096, tokens_a_row=4)


def test_absent_sampling_is_on_and_null_is_vllms_own() -> None:
    assert resolve({}, **FITS).sampling is not None
    assert resolve({"on_device_sampling_config": None}, **FITS).sampling is None
    greedy = resolve({"on_device_sampling_config": {"all_greedy": "yes", "max_top_k": 8}}, **FITS)
    assert greedy.sampling == Sampling(all_greedy=True, max_top_k=8)
