"""A worker that shares its components' weights with other replicas, and stays in step with them in the LM head.

Touches vllm 0.32, ``v1/worker/gpu_worker.py`` and ``v1/worker/cpu_worker.py``: ``init_device`` (after which groups can
be made, and before the model is), ``execute_model``, ``sample_tokens`` and ``execute_dummy_batch`` (a step and its
end), and the runner's ``num_prompt_logprobs`` (requests that compute logits more than once a step).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from baton.engine.components import columns, layers
from baton.engine.components.config import component_sizes
from baton.engine.components.groups import Layout
from baton.engine.own_config import own_config
from baton.engine.workarounds import HookGone

logger = init_logger("vllm.baton.components")


class ComponentMixin:
    """Goes before a class of workers."""

    def init_device(self: Any) -> None:
        super().init_device()  # type: ignore[misc]
        parallel = self.vllm_config.parallel_config
        sizes, _ = component_sizes(own_config(self.vllm_config.additional_config))
        made = columns.make(sizes, Layout(parallel.tensor_parallel_size, parallel.data_parallel_size))
        if made.rounds is not None:
            if not hasattr(self.model_runner, "num_prompt_logprobs"):
                raise HookGone(
                    f"vllm's {type(self.model_runner).__name__}.num_prompt_logprobs is gone: replicas that share the "
                    "LM head could fall out of step"
                )
            made.rounds.comes_again = lambda: bool(self.model_runner.num_prompt_logprobs)
        columns.install(made)
        layers.register()

    def load_model(self: Any, *args: Any, **more: Any) -> Any:
        loaded = super().load_model(*args, **more)  # type: ignore[misc]
        logger.info(
            "Bytes of weights on rank %d: %s",
            torch.distributed.get_rank(),
            ", ".join(f"{name} {size}" for name, size in sorted(columns.shared().weight_bytes.items())),
        )
        return loaded

    def execute_model(self: Any, scheduler_output: Any) -> Any:
        rounds = columns.shared().rounds
        if rounds is not None and scheduler_output.total_num_scheduled_tokens > 0:
            rounds.start()
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        sampled = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._finish_logits()
        return sampled

    def execute_dummy_batch(self: Any) -> None:
        rounds = columns.shared().rounds
        if rounds is not None:
            rounds.start()
        super().execute_dummy_batch()  # type: ignore[misc]
        self._finish_logits()

    def _finish_logits(self: Any) -> None:
        if columns.shared().rounds is None:
            return
        model, config = self.model_runner.model, self.model_config
        with torch.inference_mode():
            no_rows = torch.empty(0, config.get_hidden_size(), dtype=config.dtype, device=self.model_runner.device)
            model.logits_processor.finish(model.lm_head, no_rows)


class ComponentCpuWorker(ComponentMixin, CPUWorker):
    """vLLM's CPU worker that does it."""
