"""Experts on CPU that know which of them are here.

Works around: the CPU kernels for unquantized experts (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py, 0.32)
ignore ``expert_map``: with the experts spread over ranks they take global ids for local ones, read past their weights
and end in a segmentation fault.
Can go when: ``CPUUnquantizedExperts.apply`` uses the map. Quantized ones have the same gap and are refused before a
start (launch/shapes.py).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from baton.engine.workarounds import HookGone

if TYPE_CHECKING:
    from torch import Tensor


def local_pairs(topk_ids: Tensor, expert_map: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs of token and expert that this rank computes.

    Args:
        topk_ids: [tokens, experts a token], ids of the whole model.
        expert_map: [experts of the model], the number on this rank or -1.

    Returns:
        Token, place among its experts, and local expert of each pair.
    """
    local = expert_map[topk_ids.long()]
    tokens, places = (local >= 0).nonzero(as_tuple=True)
    return tokens, places, local[tokens, places].to(topk_ids.dtype)


class MappedExperts:
    """Goes before a class of experts: hands it only the pairs whose expert is here, and adds up what it makes.

    A token none of whose experts are here gets zeros: its output is the sum over ranks.
    """

    def apply(  # noqa: PLR0917 (vLLM's order)
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        expert_map: Tensor | None,
        **kwargs: Any,
    ) -> None:
        experts: Any = super()
        if expert_map is None:
            experts.apply(output, hidden_states, w1, w2, topk_weights, topk_ids, *args, expert_map=expert_map, **kwargs)
            return
        tokens, places, ids = local_pairs(topk_ids, expert_map)
        total = torch.zeros(output.shape, dtype=torch.float32)
        if len(tokens):
            rows = hidden_states[tokens]
            made = output.new_empty(len(tokens), output.shape[1])
            weights = topk_weights[tokens, places].unsqueeze(1)
            experts.apply(made, rows, w1, w2, weights, ids.unsqueeze(1), *args, expert_map=None, **kwargs)
            total.index_add_(0, tokens, made.float())
        output.copy_(total)


@functools.cache
def mapped(experts: type) -> type:
    """*experts* with :class:`MappedExperts` in front."""
    return type(f"Mapped{experts.__name__}", (MappedExperts, experts), {})


@functools.cache
def register() -> None:
    """Let vLLM make unquantized experts of ours, by its registry for layers from elsewhere; once a process.

    Raises:
        HookGone: the classes are not what they were in 0.32.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    if not hasattr(UnquantizedFusedMoEMethod, "register_oot"):
        raise HookGone("vLLM's UnquantizedFusedMoEMethod.register_oot is gone: experts on CPU would ignore their map")

    class BatonMoEMethod(UnquantizedFusedMoEMethod):
        """vLLM's method for unquantized experts, with the class of experts that knows the map."""

        experts_cls: Any

        def __init__(self, moe: Any) -> None:
            super().__init__(moe)
            if moe.moe_parallel_config.use_ep:
                if not issubclass(self.experts_cls, CPUUnquantizedExperts):
                    raise HookGone(f"vLLM runs experts on CPU by {self.experts_cls}, which Baton doesn't know to map")
                self.experts_cls = mapped(self.experts_cls)

    UnquantizedFusedMoEMethod.register_oot(BatonMoEMethod)
