"""The sizes that steps may have: what was asked for, checked, and completed with defaults. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOKENS, SEQS, STREAK = "num_batched_tokens_buckets", "num_seqs_buckets", "max_consecutive_prefill_steps"
SAMPLING = "on_device_sampling_config"
SWITCH = "static_shapes"
KEYS = (TOKENS, SEQS)
"""Either of them in ``neuron_config`` or ``baton_config`` turns static shapes on, as ``static_shapes`` does."""

LEAST_TOKENS = 32
"""The smallest prefill bucket by default. Trainium's is 128; a CPU computes every padded row, and a short prompt would
cost four times as much."""

DEFAULT_STREAK = 4
"""Prefill steps in a row while a decode waits. Each of them is at most ``max_num_batched_tokens`` long."""

MAX_TOP_K = 256


class TooLarge(ValueError):
    """A step that is larger than the largest bucket: it is never run."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled inside the graph.

    Attributes:
        all_greedy: whether every request gets the likeliest token, so that no logits leave the graph.
        max_top_k: the largest top-k that a request may ask for; without one this many tokens are looked at.
    """

    all_greedy: bool = False
    max_top_k: int = MAX_TOP_K


@dataclass(frozen=True)
class StaticShapes:
    """The sizes of one engine.

    Attributes:
        tokens: of prefill steps, in tokens, ascending.
        seqs: of decode steps, in requests, ascending.
        max_consecutive_prefill_steps: after so many a waiting decode has its turn.
        sampling: None leaves sampling to vLLM.
    """

    tokens: tuple[int, ...]
    seqs: tuple[int, ...]
    max_consecutive_prefill_steps: int = DEFAULT_STREAK
    sampling: Sampling | None = field(default_factory=Sampling)


def asked_for(config: Mapping[str, Any]) -> bool:
    """Whether *config* (``neuron_config`` and ``baton_config`` as one) chooses static shapes."""
    return bool(config.get(SWITCH)) or any(config.get(key) is not None for key in KEYS)


def smallest(size: int, buckets: Sequence[int], what: str = "a step") -> int:
    """The smallest of *buckets* that *size* fits in.

    Raises:
        TooLarge: it fits in none.
    """
    for bucket in buckets:
        if bucket >= size:
            return bucket
    raise TooLarge(f"{what} of {size} is larger than the largest bucket, {buckets[-1]}")


def padded_tokens(
    shapes: StaticShapes, *, num_tokens: int, num_reqs: int, longest: int, tokens_a_row: int, decodes: bool
) -> int:
    """The size in tokens that a step is padded to.

    Args:
        num_tokens: true tokens of all requests.
        num_reqs: requests.
        longest: tokens of the longest.
        tokens_a_row: see :func:`resolve`.
        decodes: whether the engine has graphs for decode; the last token of a prompt is then computed by one.

    Raises:
        TooLarge: there is no bucket for it.
    """
    if longest <= tokens_a_row and (decodes or num_reqs > 1):
        return smallest(num_reqs, shapes.seqs, "a decode step") * tokens_a_row
    return smallest(num_tokens, shapes.tokens, "a prefill step")


def may_be_padded(rows: int, shapes: StaticShapes, tokens_a_row: int = 1) -> bool:
    """Whether a step of *rows* tokens may hold fewer true ones: not so when one less would have a bucket of its own."""
    if rows in shapes.tokens or tokens_a_row > 1:
        return rows > 1
    return rows > 1 and rows - 1 not in shapes.seqs


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """*first*, twice that and so on below *last*, then *last*."""
    made = []
    while first < last:
        made.append(first)
        first *= 2
    return (*made, last)


def resolve(
    config: Mapping[str, Any], *, max_tokens: int, max_seqs: int, max_len: int, tokens_a_row: int = 1
) -> StaticShapes:
    """The sizes that *config* asks for.

    Args:
        max_tokens: vLLM's ``max_num_batched_tokens``.
        max_seqs: vLLM's ``max_num_seqs``.
        max_len: vLLM's ``max_model_len``: no prompt, and so no prefill step, is longer.
        tokens_a_row: of a request in a decode step: 1, and one for each speculative token.

    Raises:
        ValueError: something in it is wrong; the message has every problem with its remedy.
    """
    found = problems(config, max_tokens=max_tokens, max_seqs=max_seqs, max_len=max_len, tokens_a_row=tokens_a_row)
    if found:
        raise ValueError("; ".join(found))
    tokens, seqs = config.get(TOKENS), config.get(SEQS)
    return StaticShapes(
        tokens=tuple(tokens) if tokens is not None else powers_of_two(LEAST_TOKENS, min(max_tokens, max_len)),
        seqs=tuple(seqs) if seqs is not None else powers_of_two(1, max_seqs),
        max_consecutive_prefill_steps=_or(config.get(STREAK), DEFAULT_STREAK),
        sampling=_sampling(config),
    )


def problems(
    config: Mapping[str, Any],
    *,
    max_tokens: int | None = None,
    max_seqs: int | None = None,
    max_len: int | None = None,
    tokens_a_row: int = 1,
) -> list[str]:
    """Every problem of *config*, each with the parameter, the value and the remedy.

    Args:
        max_tokens, max_seqs, max_len: see :func:`resolve`; None is not known, and not compared.
    """
    largest, flag = None, "--max-num-batched-tokens"
    if max_tokens is not None and max_len is not None:
        largest, flag = (max_tokens, flag) if max_tokens <= max_len else (max_len, "--max-model-len")
    found = [
        *_list_problems(config, TOKENS, largest, flag),
        *_list_problems(config, SEQS, max_seqs, "--max-num-seqs"),
    ]
    streak = config.get(STREAK)
    if streak is not None and not (_whole(streak) and streak > 0):
        found.append(f"{STREAK} is {streak!r}: it must be a whole number of 1 or more (default {DEFAULT_STREAK})")
    switch = config.get(SWITCH)
    if switch is not None and not isinstance(switch, bool):
        found.append(f"{SWITCH} is {switch!r}: it must be true or false")
    elif switch is False and any(config.get(key) is not None for key in KEYS):
        found.append(f"{SWITCH} is false, and buckets are given: drop one of them")
    if max_tokens is not None and max_seqs is not None and max_seqs * tokens_a_row > max_tokens:
        rows = f" times {tokens_a_row} tokens each" if tokens_a_row > 1 else ""
        found.append(
            f"--max-num-seqs is {max_seqs}{rows} and --max-num-batched-tokens is {max_tokens}: the largest decode step "
            "would not fit; raise --max-num-batched-tokens or lower --max-num-seqs"
        )
    return [*found, *_sampling_problems(config.get(SAMPLING))]


def _list_problems(config: Mapping[str, Any], name: str, most: int | None, flag: str) -> list[str]:
    given = config.get(name)
    if given is None:
        return []
    if not isinstance(given, list):
        return [f"{name} is {given!r}: it must be a list of numbers, such as [{most or 128}]"]
    if not given:
        return [f"{name} is empty: give at least one bucket, or leave it out"]
    found = [
        f"{name}[{index}] is {value!r}: it must be a whole number of 1 or more"
        for index, value in enumerate(given)
        if not (_whole(value) and value > 0)
    ]
    if found:
        return found
    found = [
        f"{name}[{index + 1}] is {after} after {before}: buckets must ascend, each once"
        for index, (before, after) in enumerate(itertools.pairwise(given))
        if after <= before
    ]
    if most is not None and given[-1] != most:
        found.append(
            f"{name} ends with {given[-1]} and {flag} is {most}: the last bucket must be {most}; change either of them"
        )
    return found


def _sampling_problems(given: Any) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, Mapping):
        return [f"{SAMPLING} is {given!r}: it must be an object, or null to sample outside the graph"]
    found = []
    if _flag(given.get("all_greedy", False)) is None:
        found.append(f"{SAMPLING}.all_greedy is {given['all_greedy']!r}: it must be true or false")
    top = given.get("max_top_k", MAX_TOP_K)
    if not (_whole(top) and top > 0):
        found.append(f"{SAMPLING}.max_top_k is {top!r}: it must be a whole number of 1 or more")
    return found


def _sampling(config: Mapping[str, Any]) -> Sampling | None:
    given = config.get(SAMPLING, {})
    if given is None:
        return None
    return Sampling(bool(_flag(given.get("all_greedy", False))), given.get("max_top_k", MAX_TOP_K))


def _flag(value: Any) -> bool | None:
    """A truth value, or one of the words that stand for it; None for anything else."""
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower())
    return bool(value) if value in (True, False) else None


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
