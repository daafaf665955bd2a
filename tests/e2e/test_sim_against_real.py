"""The lab's fake engines against the real ones: what differs is known, each thing with its reason."""

from __future__ import annotations

import asyncio

from baton.sim import compare
from tests.e2e.conftest import Pair


def test_the_fake_differs_from_real_engines_only_where_it_is_meant_to(pair: Pair) -> None:
    found = asyncio.run(compare(pair.prefill.url, pair.decode.url))
    assert [str(difference) for difference in found if not difference.known] == []
    # What real engines do with a ticket that was used is the one thing that the lab must not do.
    assert any("same text" in difference.where for difference in found)
