"""The comparison with real engines: what is compared, tried on another fake."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.cluster import TransferMode
from baton.sim import Case, Difference, EngineSettings, Fault, Lab, Unreachable, cases, compare, specs
from baton.sim.check import differences, shape


def check(chosen: list[Case] | None = None, faults: list[str] | None = None, **settings: Any) -> list[Difference]:
    async def go() -> list[Difference]:
        lab = Lab(specs(1, 1, EngineSettings(model="other", block_size=16, max_model_len=2048, **settings)))
        await lab.start()
        try:
            await lab.set_faults([Fault.parse(each) for each in faults or []])
            return await compare(lab.engines["P0"].url, lab.engines["D0"].url, chosen)
        finally:
            await lab.stop()

    return asyncio.run(go())


def named(*parts: str) -> list[Case]:
    return [case for case in cases() if any(part in case.name for part in parts)]


def test_a_fake_does_not_differ_from_a_fake() -> None:
    assert len(cases()) > 40
    assert check(decode_step_seconds=0.02, lease_seconds=1.0) == []


def test_an_engine_that_behaves_otherwise_is_found_out() -> None:
    found = check(named("plain /v1/completions"), ["status=418,phase=plain"])
    assert ("1. D /v1/completions status", 418, 200) in [(each.where, each.real, each.fake) for each in found]


def test_an_engine_without_tickets_is_found_out() -> None:
    found = check(named("ticket in a stream"), ["no-ticket,phase=prefill"])
    assert any("kv_transfer_params" in each.where for each in found)


def test_a_fake_does_not_differ_from_a_fake_in_write_mode_and_with_turns_either() -> None:
    assert check(decode_step_seconds=0.02, lease_seconds=1.0, mode=TransferMode.WRITE) == []
    chosen = cases(bidirectional=True)
    assert len(chosen) > len(cases()) + 6
    assert check(decode_step_seconds=0.02, lease_seconds=1.0, bidirectional=True) == []


def test_in_write_mode_nothing_is_compared_that_names_blocks() -> None:
    pushed = {case.name for case in cases(TransferMode.WRITE)}
    assert {case.name for case in cases()} - pushed == {"ticket used twice", "ticket of an unknown engine"}


def test_engines_without_a_connector_are_not_compared() -> None:
    with pytest.raises(Unreachable, match="no KV connector"):
        check(connector=False)


def test_a_known_difference_carries_its_reason() -> None:
    case = Case("c", (), known={"same text": "by luck"})
    assert differences(case, {"1 same text": True}, {"1 same text": False})[0].known == "by luck"
    assert differences(case, {"1 status": 200}, {"1 status": 500})[0].known is None


def test_a_shape_is_keys_and_kinds_and_an_errors_words_without_numbers() -> None:
    assert shape({"a": [{"b": 1}], "c": None, "d": "x", "e": [], "f": True}) == {
        "a[].b": "number",
        "c": "null",
        "d": "text",
        "e": "[]",
        "f": "true or false",
    }
    assert shape({"error": {"message": "at most 12 tokens", "code": 400}}) == {
        "error.message": "at most # tokens",
        "error.code": "#",
    }
