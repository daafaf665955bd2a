"""Eagle3 across the hand-off: prefill makes the model's and the draft's KV cache, decode drafts from it and verifies.

The model goes on with letters that repeat after 64, and so does its draft: both by attention to where they stood one
period ago (scripts/train_eagle.py made them). A draft whose KV cache is not the prompt's drafts what is refused.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engines import Server, eventually
from tests.e2e.topology import BLOCK, Cluster, Engine, answers, check, cluster, pair_proxy, reference, used_kv

MODELS = Path(__file__).parent / "eagle"
DRAFTED = 3
TOKENS = 48
PERIOD = 64
LENGTHS = (9, 48, 70, 77, 90, 110, 112, 150, 175, 180, 200, *(BLOCK * k + d for k in (2, 4, 6) for d in (-1, 0, 1)))
"""Of the 20 prompts, in tokens; what follows the longer ones stands in them."""


def speculative(models: Path, **more: Any) -> tuple[str, str]:
    config = {"method": "eagle3", "model": str(models / "draft"), "num_speculative_tokens": DRAFTED, **more}
    return "--speculative-config", json.dumps(config)


def periodic(length: int, chance: random.Random) -> list[int]:
    """A prompt of *length* tokens."""
    once = [chance.randrange(10, 90) for _ in range(PERIOD)]
    return (once * (length // PERIOD + 1))[:length]


def prompts() -> dict[str, list[int]]:
    chance = random.Random(5)
    return {f"{length} tokens": periodic(length, chance) for length in LENGTHS}


@dataclass(frozen=True)
class Pairs:
    """One decode server behind two prefill servers, each with a proxy; the second's draft has random weights."""

    good: Cluster
    garbled: Cluster


@pytest.fixture(scope="module")
def pairs(logs: Path) -> Iterator[Pairs]:
    # Not among what the handshake compares: such a pair of engines would serve for ever, only slower.
    garbling = Engine(speculative(MODELS, draft_load_config={"load_format": "dummy"}))
    plain = Engine(speculative(MODELS))
    with (
        cluster("eagle", MODELS / "target", logs, prefill=(plain, garbling), decode=(plain,)) as made,
        ExitStack() as stack,
    ):
        good, garbled = (
            replace(made, prefill=[prefill], proxy=stack.enter_context(pair_proxy(prefill, made.decode[0], logs)))
            for prefill in made.prefill
        )
        yield Pairs(good, garbled)


@dataclass(frozen=True)
class Drafts:
    """What a server drafted, in tokens, how many of them it took, and the texts that came of it."""

    drafted: float
    accepted: float
    texts: Mapping[str, str]

    @property
    def rate(self) -> float:
        return self.accepted / self.drafted


def drafts_of(server: Server, url: str) -> Drafts:
    """What *server* drafts while *url* answers every other prompt, one after the other, with 48 tokens each.

    A request that was handed over begins with a step of one token, which vLLM 0.32 fills up to the size of a step with
    drafts by placeholders (v1/core/sched/scheduler.py, pad_spec_decode), and counts them as drafts that are refused.
    They are taken out here.
    """
    asked = dict(list(prompts().items())[::2])
    before = drafted(server)
    texts = answers(url, asked, max_tokens=TOKENS)
    made, accepted = (now - then for now, then in zip(drafted(server), before, strict=True))
    placeholders = 0 if url == server.url else DRAFTED * len(asked)
    print(f"{accepted:.0f} of {made:.0f} drafted tokens accepted, {placeholders} of them placeholders")
    return Drafts(made - placeholders, accepted, texts)


def drafted(server: Server) -> list[float]:
    """Tokens drafted and accepted since its start."""
    assert eventually(lambda: used_kv([server]), 0.0) == 0.0, "its counters are behind until its blocks are free"
    return [server.metric(f"vllm:spec_decode_num_{which}_tokens_total") for which in ("draft", "accepted")]


@pytest.fixture(scope="module")
def alone(pairs: Pairs) -> Drafts:
    """The decode server by itself, doing both phases."""
    (decode,) = pairs.good.decode
    return drafts_of(decode, decode.url)


def test_the_text_is_one_servers(pairs: Pairs) -> None:
    asked = prompts()
    check(pairs.good, reference(pairs.good.decode[0], asked), asked)


def test_the_drafts_kv_cache_comes_over_with_the_models(pairs: Pairs) -> None:
    """Of two blocks: five layers' keys and values, two heads of 32 each, in float32."""
    (decode,) = pairs.good.decode
    before = decode.metric("vllm:nixl_bytes_transferred_sum")
    answers(pairs.good.proxy.url, {"": periodic(2 * BLOCK, random.Random(6))})
    expected = before + 2 * BLOCK * 5 * 2 * 2 * 32 * 4
    assert eventually(lambda: decode.metric("vllm:nixl_bytes_transferred_sum"), expected) == expected


def test_drafts_are_accepted_after_a_hand_off_as_on_one_server(pairs: Pairs, alone: Drafts) -> None:
    """One after the other, greedy, in float32: the drafts are the same but where two letters are as likely.

    Some 400 tokens are drafted: 2 % of them are what three lost drafts come to.
    """
    handed = drafts_of(pairs.good.decode[0], pairs.good.proxy.url)
    assert alone.rate > 0.5
    assert handed.rate == pytest.approx(alone.rate, abs=0.02)
    assert handed.drafted == pytest.approx(alone.drafted, rel=0.02)
    assert handed.texts == alone.texts


def test_a_wrong_kv_cache_of_the_draft_is_seen_in_its_acceptance_and_not_in_the_text(
    pairs: Pairs, alone: Drafts
) -> None:
    """It is what the test before measures: without the prompt's own KV cache the draft cannot know what to copy."""
    garbled = drafts_of(pairs.garbled.decode[0], pairs.garbled.proxy.url)
    assert garbled.rate < alone.rate - 0.2
    assert garbled.texts == alone.texts
