"""Eagle3 with experts spread over the ranks of the decode server, behind a plain prefill server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_eagle import drafts_of, prompts, speculative
from tests.e2e.topology import Cluster, Engine, check, cluster, reference

MODELS = Path(__file__).parent / "eagle_experts"
SPREAD = ("--data-parallel-size", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def spread(logs: Path) -> Iterator[Cluster]:
    drafting = speculative(MODELS)
    decode = Engine((*drafting, *SPREAD), side_channels=2)
    with cluster("eagle-experts", MODELS / "target", logs, prefill=(Engine(drafting),), decode=(decode,)) as made:
        yield made


def test_the_text_is_one_servers_with_experts_spread_over_ranks(spread: Cluster) -> None:
    asked = prompts()
    check(spread, reference(spread.prefill[0], asked), asked)


def test_drafts_are_accepted_after_a_hand_off_as_on_the_ranks_themselves(spread: Cluster) -> None:
    (decode,) = spread.decode
    alone, handed = drafts_of(decode, decode.url), drafts_of(decode, spread.proxy.url)
    assert alone.rate > 0.5
    assert handed.rate == pytest.approx(alone.rate, abs=0.02)
    assert handed.texts == alone.texts
