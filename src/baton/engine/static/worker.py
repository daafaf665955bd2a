"""vLLM's CPU worker with our model runner.

Touches, of vllm 0.32 (v1/worker/cpu_worker.py): ``init_device``, which names its runner's class, and
``compile_or_warm_up_model``, which is called once the KV cache is there.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from baton.engine.static.runner import StaticModelRunner
from baton.engine.workarounds import HookGone


class StaticWorker(CPUWorker):
    """Runs steps of a few sizes only."""

    def init_device(self) -> None:
        super().init_device()
        if self.use_v2_model_runner:
            raise HookGone("static shapes need vLLM's V1 model runner: leave VLLM_USE_V2_MODEL_RUNNER out")
        # vLLM's own is a few buffers at this point, and is dropped.
        self.model_runner = StaticModelRunner(self.vllm_config, torch.device("cpu"))

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.warm_up()
        return super().compile_or_warm_up_model()
