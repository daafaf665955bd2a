from __future__ import annotations

import pytest

from baton.engine.settings import EngineSettings, format_cpus, parse_cpus


@pytest.mark.parametrize(("text", "cpus"), [("", ()), ("3", (3,)), ("0-2,8", (0, 1, 2, 8)), ("5, 4-5", (4, 5))])
def test_core_lists_are_read(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["a", "1-", "-1", "3-1", "1-2-3"])
def test_wrong_core_lists_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="core"):
        parse_cpus(text)


@pytest.mark.parametrize("cpus", [(), (0,), (0, 1), (0, 2, 3, 4, 9)])
def test_core_lists_survive_the_way_through_text(cpus: tuple[int, ...]) -> None:
    assert parse_cpus(format_cpus(cpus)) == cpus


def test_nothing_is_active_unless_baton_starts_the_engine() -> None:
    assert not EngineSettings.read({}).active
    assert EngineSettings.read({"BATON_ENGINE": "1"}) == EngineSettings(active=True, nixl_nap_us=500)


@pytest.mark.parametrize(("name", "value"), [("BATON_NIXL_NAP_US", "fast"), ("BATON_WORKER_START", "thread")])
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{value}'"):
        EngineSettings.read({name: value})
