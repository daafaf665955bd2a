from __future__ import annotations

import pytest

from baton.engine.waiting import LONGEST_SECONDS, SHORTEST_SECONDS, Naps


def test_naps_grow_with_the_wait_and_start_short_again() -> None:
    naps = Naps()
    assert naps.seconds(10.0) == SHORTEST_SECONDS
    assert naps.seconds(10.1) == pytest.approx(0.005)
    assert naps.seconds(20.0) == LONGEST_SECONDS
    naps.busy()
    assert naps.seconds(20.1) == SHORTEST_SECONDS
