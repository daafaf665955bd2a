"""What engines count of their transfers, and whether two of them fit together: pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.cluster import TransferMode
from baton.proxy.compatibility import differences
from baton.proxy.engine_counts import EngineCounts

TEXT = b"""# HELP vllm:nixl_bytes_transferred Histogram of bytes transferred per NIXL KV Cache transfers.
# TYPE vllm:nixl_bytes_transferred histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="+Inf",model_name="m}"} 2.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m}"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m}"} 65536.0
vllm:nixl_bytes_transferred_sum{engine="1",model_name="m}"} 1.6e+07
vllm:nixl_xfer_time_seconds_sum{engine="0",model_name="m}"} 0.25
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m}"} 1.0
baton_kv_loads_total{engine="0",model_name="m}"} 3.0
vllm:prompt_tokens_total{engine="0",model_name="m}"} 99.0
"""


def test_counts_are_summed_over_ranks() -> None:
    made = EngineCounts.parse(TEXT)
    assert made == EngineCounts(moved_bytes=16065536.0, transfers=2, seconds=0.25, failures=1, loads=3)


def test_an_engine_without_such_counts_says_nothing() -> None:
    assert EngineCounts.parse(b"vllm:prompt_tokens_total 99.0\n") is None
    assert EngineCounts.parse(b"") is None


def test_a_transfer_shows_in_bytes_or_in_loads() -> None:
    none, some = EngineCounts(moved_bytes=5, loads=1), EngineCounts(moved_bytes=6, loads=1)
    assert some.moved_since(none)
    assert EngineCounts(moved_bytes=5, loads=2).moved_since(none)
    assert not none.moved_since(none)


@given(st.binary(max_size=200) | st.binary(max_size=60).map(lambda end: b"baton_kv_loads_total" + end))
def test_no_text_is_too_much(text: bytes) -> None:
    EngineCounts.parse(text)


SAME = {"vllm_version": "0.32.0", "model": "m", "dtype": "float32", "num_kv_heads": 4}


def engine(block_size: int = 32, tp_size: int = 1, bidirectional: bool = False, **other: Any) -> dict[str, Any]:
    said = {"block_size": block_size, "tp_size": tp_size, "bidirectional": bidirectional}
    return {**said, "compatibility": {**SAME, **other}}


def found(prefill: dict[str, Any], decode: dict[str, Any], mode: TransferMode = TransferMode.READ) -> list[str]:
    return differences(("P0", prefill), ("D1", decode), mode)


def test_equal_engines_fit() -> None:
    assert found(engine(), engine()) == []


def test_each_difference_names_both_values() -> None:
    assert found(engine(dtype="bfloat16"), engine(model="n")) == ["model: P0 m, D1 n", "dtype: P0 bfloat16, D1 float32"]


@pytest.mark.parametrize(
    ("prefill", "decode", "mode", "fits"),
    [
        (32, 16, TransferMode.READ, False),
        (16, 32, TransferMode.READ, True),
        (32, 16, TransferMode.WRITE, True),
        (16, 32, TransferMode.WRITE, False),
        (48, 32, TransferMode.READ, False),
    ],
)
def test_block_sizes_fit_from_the_side_that_reads_or_writes(
    prefill: int, decode: int, mode: TransferMode, fits: bool
) -> None:
    said = [] if fits else [f"block_size: P0 {prefill}, D1 {decode}"]
    assert found(engine(prefill), engine(decode), mode) == said


def test_turns_go_both_ways_and_want_equal_blocks() -> None:
    both = (engine(16, bidirectional=True), engine(32, bidirectional=True))
    assert found(*both) == ["block_size: P0 16, D1 32"]


def test_on_cpu_blocks_are_equal() -> None:
    here = {"device": "cpu"}
    assert found({**engine(16), **here}, {**engine(32), **here}) == ["block_size: P0 16, D1 32"]
    assert found({**engine(32), **here}, {**engine(32), **here}) == []


def test_tensor_parallel_sizes_divide_one_another() -> None:
    assert found(engine(tp_size=4), engine(tp_size=2)) == found(engine(tp_size=2), engine(tp_size=8)) == []
    said = ["tp_size: P0 2, D1 3, of which neither divides the other"]
    assert found(engine(tp_size=2), engine(tp_size=3)) == said


def test_what_one_does_not_say_is_not_compared() -> None:
    assert found({"compatibility": {"model": "m"}}, engine(model="n", dtype="x")) == ["model: P0 m, D1 n"]
    assert found({}, engine()) == found({"block_size": "x", "tp_size": True}, engine()) == []
