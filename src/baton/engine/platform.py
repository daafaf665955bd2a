"""vLLM's CPU platform, with the start method of its children left to the launcher, and a communicator of ours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform

from baton.engine import drafts
from baton.engine.components.prepare import prepare
from baton.engine.settings import EngineSettings
from baton.engine.static import setup as static_shapes

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class BatonCpuPlatform(CpuPlatform):
    """`CpuPlatform` whose engine core and workers are forked.

    Works around: ``CpuPlatform.check_and_update_config`` (vllm/platforms/cpu.py, 0.32) sets
    ``VLLM_WORKER_MULTIPROC_METHOD=spawn`` whatever the user chose, and every spawned child
    imports vLLM anew (8 s of one core). Forking is safe here because nothing has opened a
    device or run an OpenMP region in the parent.
    Can go when: vLLM keeps a start method that is already set.
    """

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        super().check_and_update_config(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = EngineSettings.read(os.environ).worker_start
        model = vllm_config.model_config
        if vllm_config.parallel_config.enable_expert_parallel and model is not None and model.quantization:
            # They would read past their weights (baton/engine/experts.py). The launcher says so only of local models.
            raise ValueError(
                f"--enable-expert-parallel on CPU spreads unquantized experts only, and those of {model.model} are "
                f"quantized ({model.quantization}): drop the flag, or serve a model that is not quantized"
            )

        if vllm_config.speculative_config is not None and vllm_config.parallel_config.data_parallel_size > 1:
            drafts.mend()
        if static_shapes.wanted(vllm_config):
            static_shapes.install(vllm_config)
        # After static shapes, whose worker is then one that does both.
        prepare(vllm_config)

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "baton.engine.communicator.BatonCpuCommunicator"
