"""The lab's fake engines against the real ones: what differs is known, each thing with its reason."""

from __future__ import annotations

import asyncio

from baton.sim import compare
from tests.e2e.conftest import Pair


def test_the_fake_differs_from_real_engines_only_where_it_is_meant_to(pair: Pair) -> None:
    found = asyncio.run(compare(pair.prefill.url, pair.decode.url))
    assert [str(difference) for difference in found if not difference.known] == []
    # A used ticket is refused by Baton's engines, and in the lab shows as a wrong text.
    assert any(difference.case == "ticket used twice" for difference in found)
