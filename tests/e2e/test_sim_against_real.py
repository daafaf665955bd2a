"""The lab's fake engines against the real ones: what differs is known, each thing with its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.models import EMBEDDED, ensure
from baton.sim import compare
from tests.e2e.conftest import Pair
from tests.e2e.test_hostile_tickets import MODES
from tests.e2e.topology import Engine, cluster


def test_the_fake_differs_from_real_engines_only_where_it_is_meant_to(pair: Pair) -> None:
    found = asyncio.run(compare(pair.prefill.url, pair.decode.url))
    assert [str(difference) for difference in found if not difference.known] == []
    # A used ticket is refused by Baton's engines, and in the lab shows as a wrong text.
    assert any(difference.case == "ticket used twice" for difference in found)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["write", "turns"])
def test_nor_does_it_in_write_mode_and_with_turns(mode: str, logs: Path) -> None:
    engine = Engine((*MODES[mode].flags, "--enable-prompt-tokens-details", "--enable-scale-out"))
    model = ensure(EMBEDDED["smollm2-135m-instruct"])
    with cluster(f"sim-{mode}", model, logs, prefill=(engine,), decode=(engine,)) as made:
        found = asyncio.run(compare(made.prefill[0].url, made.decode[0].url))
    assert [str(difference) for difference in found if not difference.known] == []
