"""vLLM's CPU model runner, whose every step has the size of a bucket.

vLLM's runner can pad steps already (for CUDA graphs): it asks how large a step is to be, and cuts its buffers to that.
The rows beyond the true ones write their keys and values into the null block, which nobody reads; attention leaves them
out; and their results are dropped.

Touches, of vllm 0.32 (v1/worker/gpu_model_runner.py): ``_determine_batch_execution_and_padding`` and
``_get_slot_mappings``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from baton.engine.static.buckets import StaticShapes, smallest
from baton.engine.static.setup import shapes_of
from baton.engine.static.steps import Phase
from baton.engine.workarounds import HookGone

logger = logging.getLogger("vllm.baton")

NULL_SLOT = 0
"""The first slot of block 0, which vLLM keeps back (vllm 0.32, v1/core/block_pool.py ``null_block``)."""

_HOOKS = ("_determine_batch_execution_and_padding", "_get_slot_mappings", "uniform_decode_query_len")


class StaticModelRunner(CPUModelRunner):
    """Pads each step to its bucket; see the module."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        for name in _HOOKS:
            if not hasattr(self, name):
                raise HookGone(f"vllm.v1.worker.gpu_model_runner.GPUModelRunner.{name} is gone: padding needs it")
        self.shapes: StaticShapes = shapes_of(vllm_config)

    def warm_up(self) -> None:
        """Nothing is compiled yet."""

    def bucket(self, num_tokens: int, num_reqs: int, longest: int) -> tuple[Phase, int]:
        """The phase of a step, and its padded size in tokens.

        Args:
            num_tokens: true tokens of all requests.
            num_reqs: requests.
            longest: tokens of the longest.

        Raises:
            TooLarge: there is no bucket for it.
        """
        row = self.uniform_decode_query_len
        if longest <= row:
            return Phase.DECODE, smallest(num_reqs, self.shapes.seqs, "a decode step") * row
        return Phase.PREFILL, smallest(num_tokens, self.shapes.tokens, "a prefill step")

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, num_scheduled_tokens_np: Any, max_num_scheduled_tokens: int, **more: Any
    ) -> Any:
        _, padded = self.bucket(num_tokens, num_reqs, max_num_scheduled_tokens)
        return super()._determine_batch_execution_and_padding(
            padded, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **more
        )

    def _get_slot_mappings(
        self, num_tokens_padded: int, num_reqs_padded: int, num_tokens_unpadded: int, ubatch_slices: Any = None
    ) -> Any:
        by_group, by_layer = super()._get_slot_mappings(
            num_tokens_padded, num_reqs_padded, num_tokens_unpadded, ubatch_slices
        )
        for slots in (by_group or {}).values():
            # The layers' mappings are the same tensors.
            slots[num_tokens_unpadded:num_tokens_padded].fill_(NULL_SLOT)
        return by_group, by_layer
