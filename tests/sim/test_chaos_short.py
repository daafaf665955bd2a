"""A short campaign: some scenarios of ``make chaos``, each with a few requests."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from baton.cluster import TransferMode
from baton.sim.chaos import descriptors, run
from baton.sim.faults import Fault, Kind
from baton.sim.scenarios import Scenario, asks, scenarios

EACH = 8
LEG_SECONDS = 2.5
"""Longer than a machine that is busy with other things stands still."""
REST_SECONDS = 10.0
"""Less than a lease, which would end by itself; the campaign gives one second."""
HOLD = (
    "read/json/nowhere/none",
    "write/stream/nowhere/none",
    "read/json/prefill/hang",
    "write/json/prefill/status=500",
    "read/stream/prefill/eos",
    "read/json/prefill/lease=0.5",
    "read/stream/decode/cut-stream=2",
    "write/stream/decode/no-done",
    "read/json/decode/transfer-fails",
    "write/json/decode/restart=0.2",
    "read/json/decode/reset",
    "read/stream/decode/front-status=503",
)
EVERY = {scenario.name: scenario for scenario in scenarios()}


@pytest.fixture(autouse=True)
def loop_kind() -> None:
    """On one loop: the campaign itself runs on the other."""


@pytest.mark.parametrize("name", HOLD)
def test_a_scenario_holds(name: str) -> None:
    report = asyncio.run(run(EVERY[name], seed=1, count=EACH, leg_seconds=LEG_SECONDS, rest_seconds=REST_SECONDS))
    assert report.broken == []
    assert sum(report.verdicts.values()) == EACH


def test_nothing_going_wrong_every_answer_is_right_and_no_descriptor_is_left() -> None:
    scenario = Scenario(TransferMode.READ, False, "nowhere", "none", None)

    async def twice() -> tuple[Counter[str], int]:
        await run(scenario, 1, 1)
        had = descriptors()
        report = await run(scenario, 1, EACH)
        return report.verdicts, descriptors() - had

    assert asyncio.run(twice()) == ({"right": EACH}, 0)


def test_every_fault_is_tried_in_both_phases_both_modes_and_both_kinds_of_answer() -> None:
    tried = {
        (each.mode, each.stream, each.phase, Fault.parse(each.fault).kind) for each in EVERY.values() if each.fault
    }
    only_decode = {Kind.CUT_STREAM, Kind.HANG_STREAM, Kind.ERROR_EVENT, Kind.NO_DONE}
    only_prefill = {Kind.NO_TICKET, Kind.EOS, Kind.LEASE}
    for mode in TransferMode:
        for stream in (False, True):
            prefill = {kind for m, s, phase, kind in tried if (m, s, phase) == (mode, stream, "prefill")}
            decode = {kind for m, s, phase, kind in tried if (m, s, phase) == (mode, stream, "decode")}
            assert prefill == set(Kind) - only_decode
            assert decode == set(Kind) - only_prefill - (only_decode if not stream else set())


def test_the_same_seed_asks_the_same() -> None:
    scenario = EVERY["read/json/decode/reset"]
    assert asks(scenario, 1, 20) == asks(scenario, 1, 20)
    assert asks(scenario, 1, 20) != asks(scenario, 2, 20)


def test_a_scenario_that_does_not_hold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The campaign can fail: a proxy that answers from a ticket that was used twice is found out."""
    from baton.sim.fabric import Fabric
    from baton.sim.pool import GONE

    async def wrong(*_: object, **__: object) -> list[bytes]:
        return [GONE] * 99

    monkeypatch.setattr(Fabric, "pull", wrong)
    report = asyncio.run(run(EVERY["read/json/nowhere/none"], 1, 3))
    assert report.verdicts["wrong"] == 3
    assert any("wrong text" in line for line in report.broken)
    assert any("leases held" in line for line in report.broken)
