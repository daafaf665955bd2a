"""What vLLM's configuration of an engine needs so that its replicas share components: checked, one world, our worker.

Works around: vLLM takes data parallel replicas of a dense model for independent servers, each its own world of ranks
(vllm 0.32, ``v1/engine/core.py``, ``v1/engine/utils.py``, ``distributed/parallel_state.py``: all ask
``ModelConfig.is_moe``, which is a number of experts above 0 in ``ModelConfig.model_arch_config``). A dense model whose
replicas share weights says that it has one expert: its replicas are then ranks of one world, agree on their tokens once
a step (``v1/worker/dp_utils.py``), and one without requests runs a dummy batch. No layer reads that number.
Can go when: vLLM keeps dense replicas in one world on request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baton.engine.components.config import EngineFacts, component_problems, component_sizes
from baton.engine.own_config import own_config
from baton.engine.static import setup as static
from baton.engine.workarounds import HookGone

if TYPE_CHECKING:
    from vllm.config import VllmConfig

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
WORKER = "baton.engine.components.worker.ComponentCpuWorker"
STATIC_WORKER = "baton.engine.components.static_worker.StaticComponentCpuWorker"
_OURS = {STOCK_WORKER: WORKER, static.WORKER: STATIC_WORKER}
"""The worker that is taken instead of another one; for the second, steps have the sizes of static shapes."""


def prepare(vllm_config: VllmConfig) -> None:
    """Let the replicas of an engine share what its ``--additional-config`` says; nothing unless it says so.

    Raises:
        ValueError: they cannot; the message has all reasons.
        HookGone: vLLM's configuration is not what it was in 0.32.
    """
    sizes, problems = component_sizes(own_config(_dict(vllm_config.additional_config)))
    if not sizes.active and not problems:
        return
    model = vllm_config.model_config
    if model is None:
        # vLLM makes configurations without a model for its own purposes.
        return
    problems += component_problems(sizes, _engine(vllm_config), model.hf_text_config.to_dict() | _kind(model))
    if problems:
        raise ValueError("; ".join(problems))
    if not hasattr(getattr(model, "model_arch_config", None), "num_experts"):
        raise HookGone("vllm's ModelConfig.model_arch_config.num_experts is gone: dense replicas cannot share weights")
    if not model.is_moe:
        model.model_arch_config.num_experts = 1
    if not model.is_moe:
        raise HookGone("vllm's ModelConfig.is_moe no longer asks for experts: dense replicas cannot share weights")
    vllm_config.parallel_config.is_moe_model = True
    worker = vllm_config.parallel_config.worker_cls
    if worker not in (*_OURS, *_OURS.values()):
        raise ValueError(
            f"component data parallelism needs its own worker, and this engine's is {worker}: drop what asks for that "
            "one (--worker-cls)"
        )
    vllm_config.parallel_config.worker_cls = _OURS.get(worker, worker)


def _engine(vllm_config: VllmConfig) -> EngineFacts:
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    unfit = {
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--enable-lora": vllm_config.lora_config is not None,
        "--enable-prompt-embeds": vllm_config.model_config.enable_prompt_embeds,
        "--no-enforce-eager": not vllm_config.model_config.enforce_eager,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--quantization": vllm_config.model_config.quantization is not None,
        "--speculative-config": vllm_config.speculative_config is not None,
    }
    return EngineFacts(
        tensor=parallel.tensor_parallel_size,
        data=parallel.data_parallel_size,
        kv_role=None if transfer is None else transfer.kv_role,
        spread=parallel.enable_expert_parallel,
        external=parallel.data_parallel_external_lb,
        unfit=tuple(flag for flag, given in unfit.items() if given),
    )


def _kind(model: Any) -> dict[str, Any]:
    return {"architectures": list(model.architectures)}


def _dict(additional: Any) -> dict[str, Any]:
    return additional if isinstance(additional, dict) else {}
