from __future__ import annotations

from typing import Any

import pytest

from baton.engine.components import ComponentSizes, EngineFacts, component_problems, component_sizes

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 512,
    "vocab_size": 320,
}
MOE = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "intermediate_size": 7}
DECODE = EngineFacts(tensor=2, data=4, kv_role="kv_consumer")
ALL = ComponentSizes(2, 2, 2, 2)


def test_sizes_are_one_unless_they_are_given() -> None:
    assert component_sizes({}) == (ComponentSizes(1, 1, 1, 1), [])
    assert component_sizes({"mlp_dp_size": 4, "other": "x"}) == (ComponentSizes(mlp=4), [])
    assert component_sizes({"attention_dp_size": 2})[0].active == {"attention_dp_size": 2}


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True, None, [2]])
def test_what_is_no_size_is_named_with_its_value(value: Any) -> None:
    _, problems = component_sizes({"mlp_dp_size": value, "lm_head_dp_size": value})
    assert problems == [
        f"{name} {value!r} is not a whole number of 1 or more: give one, or leave it out"
        for name in ("mlp_dp_size", "lm_head_dp_size")
    ]


def test_what_fits_has_no_problems() -> None:
    assert component_problems(ALL, DECODE, LLAMA) == []
    assert component_problems(ALL, DECODE, {}) == []
    assert component_problems(ComponentSizes(), EngineFacts(1, 1, None), {"architectures": ["GPT2LMHeadModel"]}) == []


def test_all_problems_are_told_at_once() -> None:
    engine = EngineFacts(tensor=3, data=4, kv_role="kv_producer", unfit=("--enable-lora",))
    problems = component_problems(ComponentSizes(attention=3, mlp=2, lm_head=2), engine, LLAMA)
    asked = "attention_dp_size 3, mlp_dp_size 2, lm_head_dp_size 2"
    assert problems == [
        f"{asked}: component data parallelism is for decode servers, and this one's kv_role is kv_producer: "
        "give it to --role decode only",
        "attention_dp_size 3 does not divide --data-parallel-size 4: sizes that fit are 1, 2, 4",
        f"{asked}: component data parallelism does not go together with --enable-lora; drop one of them",
        "attention_dp_size 3 with --tensor-parallel-size 3 makes 9 ranks, and the model has 8 attention heads, "
        "which does not divide by them; leave it out",
        "mlp_dp_size 2 with --tensor-parallel-size 3 makes 6 ranks, and the model has an intermediate size of 512, "
        "which does not divide by them; leave it out",
        "lm_head_dp_size 2 with --tensor-parallel-size 3 makes 6 ranks, and the model has a vocabulary of 320, "
        "which does not divide by them; leave it out",
    ]


def only(sizes: ComponentSizes, engine: EngineFacts = DECODE, model: dict[str, Any] | None = None) -> str:
    (problem,) = component_problems(sizes, engine, LLAMA if model is None else model)
    return problem


def test_one_replica_has_nobody_to_share_with() -> None:
    assert "there is one: give --data-parallel-size 4" in only(ComponentSizes(mlp=4), EngineFacts(1, 1, "kv_consumer"))


def test_no_transfer_at_all_is_no_decode_server() -> None:
    assert "kv_role is None" in only(ALL, EngineFacts(2, 4, None))
    assert component_problems(ALL, EngineFacts(2, 4, "kv_both"), LLAMA) == []


def test_a_model_that_is_not_known_is_named() -> None:
    assert "GPT2LMHeadModel is not supported; models that are: Llama" in only(
        ALL, model={"architectures": ["GPT2LMHeadModel"]}
    )


def test_sizes_that_fit_the_model_are_named() -> None:
    problem = only(ComponentSizes(mlp=4), model=LLAMA | {"intermediate_size": 12})
    assert problem.endswith("an intermediate size of 12, which does not divide by them; sizes that fit are 1, 2")


def test_key_value_heads_must_fit_too() -> None:
    model = LLAMA | {"num_attention_heads": 12, "num_key_value_heads": 6}
    assert "has 6 key-value heads: one must be a multiple of the other; sizes that fit are 1" in only(
        ComponentSizes(attention=2), model=model
    )


def test_a_vocabulary_is_looked_at_as_vllm_pads_it() -> None:
    model = LLAMA | {"vocab_size": 321}
    assert component_problems(ComponentSizes(embedding=2, lm_head=4), DECODE, model) == []
    assert "a vocabulary of 321 (padded to 384)" in only(ComponentSizes(lm_head=5), EngineFacts(1, 5, "kv_both"), model)


def test_one_matrix_for_embedding_and_lm_head_is_shared_by_both_or_none() -> None:
    tied = LLAMA | {"tie_word_embeddings": True}
    assert component_problems(ALL, DECODE, tied) == []
    assert "embedding_dp_size 2 and lm_head_dp_size 1: the model has one matrix for both" in only(
        ComponentSizes(embedding=2), model=tied
    )


def test_experts_are_spread_by_expert_parallelism() -> None:
    spread = EngineFacts(2, 4, "kv_consumer", spread=True)
    assert component_problems(ComponentSizes(2, 2, 1, 2), spread, MOE) == []
    assert "leave mlp_dp_size out" in only(ALL, spread, MOE)
    assert "add --enable-expert-parallel" in only(ComponentSizes(2, 2, 1, 2), DECODE, MOE)


def test_quantized_weights_and_other_devices_are_refused() -> None:
    assert "quantized" in only(ALL, model=LLAMA | {"quantization_config": {"quant_method": "awq"}})
    assert "CPU platform only" in only(ALL, EngineFacts(2, 4, "kv_consumer", on_cpu=False))


def test_requests_of_dense_replicas_are_shared_out_by_vllm() -> None:
    outside = EngineFacts(2, 4, "kv_consumer", spread=True, external=True)
    assert "drop --data-parallel-rank and --data-parallel-external-lb" in only(ALL, outside)
    assert component_problems(ComponentSizes(2, 2, 1, 2), outside, MOE) == []
