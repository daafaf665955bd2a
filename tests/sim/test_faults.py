"""Faults: how they are written, and when they happen."""

from __future__ import annotations

import pytest

from baton.sim import BadFault, Fault, Kind, Phase
from baton.sim.faults import VALUES, Faults


def test_a_fault_in_words_is_the_one_in_fields() -> None:
    fault = Fault.parse("status=503,engine=D1,phase=decode,count=3,p=0.5,after=2")
    assert fault == Fault(Kind.STATUS, 503, "D1", Phase.DECODE, 3, 0.5, 2)
    fields = {key: value for key, value in fault.as_dict().items() if key != "fired"}
    assert Fault.of(fields) == fault


def test_a_fault_without_a_value_has_a_usual_one() -> None:
    assert Fault.parse("status").value == 500
    assert Fault.parse("reset").value == 0.0


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("explode", "'explode'"),
        ("reset=3", "takes no value"),
        ("delay=soon", "soon"),
        ("delay=-1", "cannot be"),
        ("reset,p=2", "cannot be"),
        ("reset,where=P0", "'where'"),
        ("reset,P0", "'P0'"),
        ("reset,phase=middle", "middle"),
        ("reset,count=some", "some"),
    ],
)
def test_a_bad_fault_is_refused_with_what_is_wrong(spec: str, word: str) -> None:
    with pytest.raises(BadFault, match=word):
        Fault.parse(spec)


def test_every_kind_says_whether_it_takes_a_value() -> None:
    assert set(VALUES) == set(Kind)


def test_a_count_ends_a_fault_and_after_delays_it() -> None:
    faults = Faults()
    faults.set([Fault(Kind.RESET, count=2, after=1)])
    assert [bool(faults.draw("P0", Phase.PREFILL)) for _ in range(5)] == [False, True, True, False, False]


def test_a_fault_is_for_one_engine_and_one_phase_and_probes_only_when_named() -> None:
    faults = Faults()
    faults.set([Fault(Kind.RESET, engine="P0", phase=Phase.PREFILL), Fault(Kind.HANG)])
    assert faults.draw("P0", Phase.PREFILL) == {Kind.RESET: 0.0, Kind.HANG: 0.0}
    assert faults.draw("P1", Phase.PREFILL) == {Kind.HANG: 0.0}
    assert faults.draw("P0", Phase.PROBE) == {}


def test_chance_is_the_same_for_the_same_seed() -> None:
    def drawn(seed: int) -> list[bool]:
        faults = Faults(seed)
        faults.set([Fault(Kind.RESET, p=0.5)])
        return [bool(faults.draw("P0", Phase.DECODE)) for _ in range(64)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)
    assert 16 < sum(drawn(3)) < 48
