"""Which graphs a role makes."""

from __future__ import annotations

import pytest

from baton.engine.static.buckets import StaticShapes
from baton.engine.static.steps import Phase
from baton.engine.static.warmup import phases, targets

SHAPES = StaticShapes(tokens=(32, 128), seqs=(1, 4))
BOTH = frozenset(Phase) - {Phase.IDLE}


def names(role: str | None, **environ: str) -> list[str]:
    return [target.name for target in targets(SHAPES, phases(role, environ))]


def test_a_prefill_server_makes_prefill_graphs_only() -> None:
    assert names("kv_producer") == ["prefill bucket 128", "prefill bucket 32"]


def test_a_decode_server_makes_decode_graphs_only() -> None:
    assert names("kv_consumer") == ["decode bucket 4", "decode bucket 1"]


@pytest.mark.parametrize("role", ["kv_both", None])
def test_an_engine_of_both_makes_both(role: str | None) -> None:
    assert phases(role, {}) == BOTH
    assert len(names(role)) == 4


@pytest.mark.parametrize("name", ["VLLM_NEURON_SKIP_PREFILL_WARMUP", "BATON_SKIP_PREFILL_WARMUP"])
def test_a_variable_leaves_a_phase_out(name: str) -> None:
    assert names(None, **{name: "1"}) == ["decode bucket 4", "decode bucket 1"]
    assert names(None, **{name: "0"}) == names(None)


def test_variables_that_contradict_or_say_nothing_known_are_refused() -> None:
    with pytest.raises(ValueError, match="BATON_SKIP_DECODE_WARMUP=1 and VLLM_NEURON_SKIP_DECODE_WARMUP=0 differ"):
        phases(None, {"BATON_SKIP_DECODE_WARMUP": "1", "VLLM_NEURON_SKIP_DECODE_WARMUP": "0"})
    with pytest.raises(ValueError, match="BATON_SKIP_PREFILL_WARMUP='yes' is neither 0 nor 1"):
        phases(None, {"BATON_SKIP_PREFILL_WARMUP": "yes"})


def test_drafts_make_a_decode_graph_longer() -> None:
    assert [target.rows for target in targets(SHAPES, frozenset({Phase.DECODE}), 4)] == [16, 4]
