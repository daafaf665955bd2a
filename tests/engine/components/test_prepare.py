"""What becomes of vLLM's configuration; and the places in the installed vLLM that all of this hangs on."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.components.prepare import STATIC_WORKER, STOCK_WORKER, WORKER, prepare
from baton.engine.workarounds import HookGone

LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 320}


class Model:
    """As much of vLLM's ModelConfig as is looked at."""

    def __init__(self, architecture: str = "LlamaForCausalLM", experts: int = 0) -> None:
        self.architectures = [architecture]
        self.hf_text_config = SimpleNamespace(to_dict=lambda: LLAMA)
        self.model_arch_config = SimpleNamespace(num_experts=experts)
        self.enable_prompt_embeds = False
        self.enforce_eager = True
        self.quantization = None

    @property
    def is_moe(self) -> bool:
        return self.model_arch_config.num_experts > 0


def config(own: dict[str, Any] | None = None, **parallel: Any) -> Any:
    return SimpleNamespace(
        additional_config={} if own is None else {"baton_config": own},
        model_config=Model(),
        parallel_config=SimpleNamespace(
            **{
                "tensor_parallel_size": 1,
                "data_parallel_size": 2,
                "pipeline_parallel_size": 1,
                "decode_context_parallel_size": 1,
                "prefill_context_parallel_size": 1,
                "data_parallel_external_lb": False,
                "enable_expert_parallel": False,
                "is_moe_model": False,
                "worker_cls": STOCK_WORKER,
            }
            | parallel
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_consumer"),
        lora_config=None,
        speculative_config=None,
    )


def test_dense_replicas_are_kept_in_one_world_with_workers_of_ours() -> None:
    made = config({"mlp_dp_size": 2})
    for _ in range(2):
        # vLLM goes through it in the API server and in each engine core.
        prepare(made)
        assert made.model_config.model_arch_config.num_experts == 1
        assert (made.parallel_config.is_moe_model, made.parallel_config.worker_cls) == (True, WORKER)


def test_with_static_shapes_the_worker_is_one_that_does_both() -> None:
    from baton.engine.static import setup

    made = config({"mlp_dp_size": 2}, worker_cls=setup.WORKER)
    for _ in range(2):
        prepare(made)
        assert made.parallel_config.worker_cls == STATIC_WORKER


def test_a_model_of_experts_keeps_their_number() -> None:
    made = config({"lm_head_dp_size": 2}, enable_expert_parallel=True)
    made.model_config = Model("Qwen3MoeForCausalLM", experts=8)
    prepare(made)
    assert made.model_config.model_arch_config.num_experts == 8


@pytest.mark.parametrize("own", [None, {}, {"mlp_dp_size": 1, "num_seqs_buckets": [1]}])
def test_an_engine_that_shares_nothing_is_left_as_it_is(own: dict[str, Any] | None) -> None:
    made = config(own)
    prepare(made)
    assert (made.model_config.is_moe, made.parallel_config.worker_cls) == (False, STOCK_WORKER)


def test_a_configuration_without_a_model_is_left_as_it_is() -> None:
    made = config({"mlp_dp_size": 2})
    made.model_config = None
    prepare(made)
    assert made.parallel_config.worker_cls == STOCK_WORKER


def test_all_problems_stop_the_engine_at_once() -> None:
    made = config({"mlp_dp_size": 3, "attention_dp_size": "2"})
    made.kv_transfer_config = None
    made.model_config.enforce_eager = False
    with pytest.raises(ValueError, match="attention_dp_size '2'") as caught:
        prepare(made)
    for named in ("kv_role is None", "does not divide --data-parallel-size 2", "--no-enforce-eager", "size of 512"):
        assert named in str(caught.value)


def test_another_worker_is_not_replaced_in_silence() -> None:
    with pytest.raises(ValueError, match=r"this engine's is mine\.Worker: drop"):
        prepare(config({"mlp_dp_size": 2}, worker_cls="mine.Worker"))


def test_a_hook_that_is_gone_stops_the_engine() -> None:
    made = config({"mlp_dp_size": 2})
    del made.model_config.model_arch_config.num_experts
    with pytest.raises(HookGone, match="num_experts is gone"):
        prepare(made)


def test_vllm_has_all_places_that_we_attach_to() -> None:
    from vllm.config.model_arch import ModelArchitectureConfig
    from vllm.forward_context import DPMetadata
    from vllm.v1.worker.cpu_worker import CPUWorker

    from baton.engine.components import layers

    if not layers.register.cache_info().currsize:
        layers.check_hooks()
    assert "num_experts" in {field.name for field in dataclasses.fields(ModelArchitectureConfig)}
    assert "num_tokens_across_dp_cpu" in {field.name for field in dataclasses.fields(DPMetadata)}
    for step in ("init_device", "load_model", "execute_model", "sample_tokens", "execute_dummy_batch"):
        assert callable(getattr(CPUWorker, step))
    assert f"{CPUWorker.__module__}.{CPUWorker.__name__}" == STOCK_WORKER
