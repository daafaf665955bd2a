from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.launch.model_config import read_config
from baton.launch.shapes import Ranks, experts_of, experts_problem, ranks_of, side_channels

MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        ((), Ranks()),
        (("--tensor-parallel-size", "2", "--pipeline-parallel-size=3"), Ranks(tensor=2, pipeline=3)),
        (("-tp", "2", "-pp=3", "-dp", "4", "-ep"), Ranks(2, 3, 4, 4, spread=True)),
        (("--data-parallel-size", "2", "--enable-expert-parallel"), Ranks(data=2, local=2, spread=True)),
        (("-dp", "2", "-dp", "4"), Ranks(data=4, local=4)),
        (("-dp", "4", "--data-parallel-size-local", "2", "--data-parallel-start-rank", "2"), Ranks(1, 1, 4, 2, 2)),
        (("-dp", "4", "--data-parallel-rank", "3"), Ranks(1, 1, 4, 1, 3)),
        (("-dp", "4", "--data-parallel-external-lb"), Ranks(data=4)),
        (("-tp", "two", "-dp", "0"), Ranks()),
        (("--tensor-parallel-size",), Ranks()),
    ],
)
def test_ranks_are_what_the_flags_ask_for(args: tuple[str, ...], ranks: Ranks) -> None:
    assert ranks_of(args) == ranks


def test_a_worker_is_a_rank_of_all_three_kinds() -> None:
    assert Ranks(tensor=2, pipeline=3, data=8, local=4).workers == 24


def test_each_data_parallel_rank_has_a_side_channel() -> None:
    assert side_channels(5659, Ranks(tensor=2)) == {5659: "side channel"}
    assert side_channels(5659, Ranks(data=4, local=2, first=2)) == {
        5661: "side channel of rank 2",
        5662: "side channel of rank 3",
    }


@pytest.mark.parametrize(
    ("config", "experts"),
    [
        ({"num_experts": 8}, 8),
        ({"n_routed_experts": 64, "num_experts": None}, 64),
        ({"num_local_experts": 4}, 4),
        ({"moe_num_experts": [16, 16]}, 16),
        ({"block_configs": [{"block_type": "attention"}, {"block_type": "moe", "n_routed_experts": 128}]}, 128),
        ({"num_experts": 0}, 0),
        ({}, 0),
    ],
)
def test_experts_are_counted_by_all_their_names(config: dict[str, object], experts: int) -> None:
    assert experts_of(config) == experts


def problem(config: dict[str, object], *args: str, on_cpu: bool = True) -> str | None:
    return experts_problem(config, "m", args, on_cpu=on_cpu)


def test_experts_that_fit_are_no_problem() -> None:
    assert problem(MOE, "-ep", "-dp", "2", "-tp", "4") is None
    assert problem(MOE, "-dp", "3") is None
    assert problem({}, "-ep") is None


def test_a_model_without_experts_is_refused_by_flag_and_name() -> None:
    dense = {"architectures": ["LlamaForCausalLM"]}
    assert problem(dense, "--enable-expert-parallel") == (
        "--enable-expert-parallel spreads experts over ranks, and m (LlamaForCausalLM) has none: "
        "drop the flag, or serve a mixture of experts"
    )


def test_uneven_experts_are_refused_with_both_numbers() -> None:
    assert problem(MOE, "-ep", "-dp", "3", "-tp", "2") == (
        "--enable-expert-parallel cannot spread the 8 experts of m evenly over 6 ranks "
        "(--tensor-parallel-size 2 x --data-parallel-size 3): numbers that fit are 1, 2, 4, 8"
    )


def test_quantized_experts_are_refused_on_cpu_alone() -> None:
    quantized = {**MOE, "quantization_config": {"quant_method": "fp8"}}
    assert "those of m are quantized (fp8)" in str(problem(quantized, "-ep", "-dp", "2"))
    assert "(int8)" in str(problem(MOE, "-ep", "-dp", "2", "--quantization", "int8"))
    assert problem(quantized, "-ep", "-dp", "2", on_cpu=False) is None
    assert problem({**MOE, "quantization_config": {}}, "-ep", "-dp", "2") is None


def test_a_config_is_read_with_its_text_part_and_never_fails(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert read_config(tmp_path) == {}
    for text in ("{", "[]", '"a"'):
        path.write_text(text)
        assert read_config(tmp_path) == {}
    path.write_text(json.dumps({"model_type": "x", "text_config": {"num_experts": 4}}))
    assert experts_of(read_config(tmp_path)) == 4
