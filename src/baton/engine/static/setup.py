"""How an engine's vLLM config comes to have static shapes: called by the platform, once the config is complete."""

from __future__ import annotations

import logging
import os
from typing import Any

from baton.engine.own_config import own_config
from baton.engine.settings import EngineSettings
from baton.engine.static.buckets import StaticShapes, asked_for, resolve
from baton.engine.static.store import FORMAT

logger = logging.getLogger("vllm.baton")

SCHEDULER = "baton.engine.static.scheduler.StaticScheduler"
ASYNC_SCHEDULER = "baton.engine.static.scheduler.StaticAsyncScheduler"
WORKER = "baton.engine.static.worker.StaticWorker"
_STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


def wanted(vllm_config: Any) -> bool:
    """Whether static shapes were chosen, by the flag or by bucket keys."""
    if EngineSettings.read(os.environ).static_shapes:
        return True
    return asked_for(own_config(_additional(vllm_config)))


def shapes_of(vllm_config: Any) -> StaticShapes:
    """The sizes of an engine.

    Raises:
        ValueError: its settings are wrong; the message has every problem.
    """
    scheduler = vllm_config.scheduler_config
    return resolve(
        own_config(_additional(vllm_config)),
        max_tokens=scheduler.max_num_batched_tokens,
        max_seqs=scheduler.max_num_seqs,
        max_len=vllm_config.model_config.max_model_len,
        tokens_a_row=1 + vllm_config.num_speculative_tokens,
    )


def install(vllm_config: Any) -> None:
    """Put our scheduler and worker in the place of vLLM's own.

    Raises:
        ValueError: what is asked for cannot be had with static shapes; the message has every problem.
    """
    found = []
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    try:
        shapes_of(vllm_config)
    except ValueError as error:
        found.append(str(error))
    if scheduler.policy != "fcfs":
        found.append(f"--scheduling-policy is {scheduler.policy}: static shapes keep to fcfs; leave it out")
    if model is not None and model.runner_type != "generate":
        found.append(f"{model.model} is a {model.runner_type} model: static shapes need one that generates")
    if model is not None and (model.is_encoder_decoder or model.is_hybrid):
        found.append(f"{model.model} is no decoder of attention layers only: static shapes do not do that")
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        found.append(
            f"--pipeline-parallel-size is {vllm_config.parallel_config.pipeline_parallel_size}: static shapes need 1; "
            "use --tensor-parallel-size"
        )
    if found:
        raise ValueError("static shapes: " + "; ".join(found))
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = ASYNC_SCHEDULER if scheduler.async_scheduling else SCHEDULER
    elif scheduler.scheduler_cls not in (SCHEDULER, ASYNC_SCHEDULER):
        logger.warning("--scheduler-cls %s stays: its steps may mix prefill and decode", scheduler.scheduler_cls)
    if vllm_config.parallel_config.worker_cls == _STOCK_WORKER:
        vllm_config.parallel_config.worker_cls = WORKER
    if graphs_problem(vllm_config) is None:
        _leave_compiling_to_us(vllm_config.compilation_config)


def graphs_problem(vllm_config: Any) -> str | None:
    """Why steps are padded but not compiled, or None."""
    if vllm_config.model_config.enforce_eager:
        return "--enforce-eager"
    if vllm_config.lora_config is not None:
        return "adapters (--enable-lora)"
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if vllm_config.model_config.is_multimodal_model or vllm_config.model_config.enable_prompt_embeds:
        return "inputs that are no tokens"
    return None


def depends_on(vllm_config: Any) -> dict[str, Any]:
    """What compiled code depends on of an engine's config: model, types, ranks."""
    from vllm import __version__

    parallel = vllm_config.parallel_config
    return {
        "vllm": __version__,
        "model": vllm_config.model_config.compute_hash(),
        "ranks": [parallel.tensor_parallel_size, parallel.rank, parallel.data_parallel_size],
        "experts": parallel.enable_expert_parallel,
        "cache_type": vllm_config.cache_config.cache_dtype,
        "custom_ops": vllm_config.compilation_config.custom_ops,
        "baton": FORMAT,
    }


def _leave_compiling_to_us(compilation: Any) -> None:
    """vLLM's own compilation (one graph for all sizes) off, its layers as Inductor likes them."""
    from vllm.config import CompilationMode

    compilation.mode = CompilationMode.NONE
    if "all" in compilation.custom_ops:
        compilation.custom_ops[compilation.custom_ops.index("all")] = "none"


def _additional(vllm_config: Any) -> dict[str, Any]:
    given = vllm_config.additional_config
    return given if isinstance(given, dict) else {}
