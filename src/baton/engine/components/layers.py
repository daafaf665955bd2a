"""Layers that hold a part of a component's weights and compute it for the rows of all replicas in their column.

They go in place of vLLM's by its registry for layers from elsewhere (vllm 0.32, ``model_executor/custom_op.py``,
`PluggableLayer.register_oot`), which looks classes up by name whenever a model makes one. A layer whose component is
not shared behaves as vLLM's own.

Around each component: gather the column's rows, compute with this rank's part, and bring back this replica's rows,
either summed (row-parallel matrices, embeddings) or with the parts side by side (queries, keys, values, logits). What
comes out is what tensor parallelism alone would have at that rank, so that the model around the layers, its attention
and its KV cache stay as they are, for any number of rows a replica: prefill is right as well as decode.

vLLM's layers are made with sizes divided by the column's, which gives weights of the right shape, and are then told
their shard: ``tp_rank``, ``tp_size`` and ``update_param_tp_status`` are what its weight loaders go by
(``model_executor/layers/linear.py``, ``model_executor/parameter.py``).
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from baton.engine.components.columns import Column, shared
from baton.engine.components.groups import kv_heads_a_rank
from baton.engine.workarounds import HookGone

if TYPE_CHECKING:
    from torch import Tensor


def _column(component: str, prefix: str, ending: str) -> Column | None:
    """The column of *component* when a layer called *prefix* is the one that ends like it; else None."""
    return shared().columns.get(component) if prefix.endswith(ending) else None


def _count(component: str, layer: torch.nn.Module) -> None:
    size = sum(weight.numel() * weight.element_size() for weight in layer.parameters(recurse=False))
    counts = shared().weight_bytes
    counts[component] = counts.get(component, 0) + size


def _tell_shard(layer: Any, column: Column) -> None:
    layer.tp_rank, layer.tp_size = column.shard, column.shards
    layer.update_param_tp_status()


class SharedQKV(QKVParallelLinear):
    """Queries, keys and values: part of the heads for all rows, then all heads of the tensor parallel rank for ours.

    Several ranks of a column hold the same key-value head when there are fewer of those than ranks; it is taken from
    the first of them.
    """

    column: Column | None

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        *args: Any,
        prefix: str = "",
        **more: Any,
    ) -> None:
        column = _column("attention", prefix, ".self_attn.qkv_proj")
        kv_heads = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        heads_here, kv_heads_here = total_num_heads, kv_heads
        if column is not None:
            held, replicas = kv_heads_a_rank(kv_heads, column.shards)
            heads_here, kv_heads_here = total_num_heads // column.size, held * column.shards // column.size
        super().__init__(hidden_size, head_size, heads_here, kv_heads_here, *args, prefix=prefix, **more)
        self.column = column
        if column is not None:
            self.total_num_heads, self.total_num_kv_heads = total_num_heads, kv_heads
            self.num_kv_heads, self.num_kv_head_replicas = held, replicas
            # Ranks of the column from one to the next with other heads.
            self.kv_stride = min(replicas, column.size)
            _tell_shard(self, column)
        _count("attention", self)

    def forward(self, input_: Tensor) -> Any:
        column = self.column
        if column is None:
            return super().forward(input_)
        sizes = column.rows()
        part, bias = super().forward(column.gather(input_, sizes))
        joined = column.join(part, sizes).unflatten(1, (column.size, part.shape[1]))
        widths = [self.num_heads * self.head_size, *[self.num_kv_heads * self.head_size] * 2]
        queries, keys, values = joined.split(widths, dim=2)
        kept = [queries, keys[:, :: self.kv_stride], values[:, :: self.kv_stride]]
        return torch.cat([each.flatten(1) for each in kept], dim=1), bias


class SharedGateUp(MergedColumnParallelLinear):
    """The first half of an MLP: part of the intermediate size, for all rows; they stay gathered for the second half."""

    column: Column | None

    def __init__(self, input_size: int, output_sizes: list[int], *args: Any, prefix: str = "", **more: Any) -> None:
        column = _column("mlp", prefix, ".mlp.gate_up_proj")
        here = output_sizes if column is None else [size // column.size for size in output_sizes]
        super().__init__(input_size, here, *args, prefix=prefix, **more)
        self.column = column
        if column is not None:
            self.output_sizes = output_sizes
            _tell_shard(self, column)
        _count("mlp", self)

    def forward(self, input_: Tensor) -> Any:
        if self.column is not None:
            input_ = self.column.gather(input_, self.column.rows())
        return super().forward(input_)


class SharedRow(RowParallelLinear):
    """The second half of an MLP, whose rows are gathered already, or attention's output, whose heads are shared out."""

    column: Column | None

    def __init__(self, input_size: int, *args: Any, prefix: str = "", **more: Any) -> None:
        attention = _column("attention", prefix, ".self_attn.o_proj")
        column = attention or _column("mlp", prefix, ".mlp.down_proj")
        super().__init__(input_size if column is None else input_size // column.size, *args, prefix=prefix, **more)
        self.column, self.shares_heads = column, attention is not None
        if column is not None:
            self.input_size = input_size
            # The sum is made here.
            self.reduce_results = False
            _tell_shard(self, column)
        _count("attention" if prefix.endswith(".o_proj") else "mlp", self)

    def forward(self, input_: Tensor) -> Any:
        column = self.column
        if column is None:
            return super().forward(input_)
        sizes = column.rows()
        partial, bias = super().forward(column.split(input_, sizes) if self.shares_heads else input_)
        return tensor_model_parallel_all_reduce(column.sum_own(partial, sizes)), bias


class _SharedVocabulary(VocabParallelEmbedding):
    """A part of a vocabulary: vLLM's layer cuts it by the group it is given, which is the column's shard here."""

    component: str
    column: Column | None

    def __init__(self, *args: Any, **more: Any) -> None:
        column = shared().columns.get(self.component)
        if column is not None:
            more |= {"parallel_group": column, "reduce_results": False}
        super().__init__(*args, **more)
        self.column = column
        _count(self.component, self)


class SharedEmbedding(_SharedVocabulary):
    """Looks the tokens of all rows up in its part of the vocabulary; each is found in one part."""

    component = "embedding"

    def forward(self, input_: Tensor) -> Any:
        column = self.column
        if column is None:
            return super().forward(input_)
        sizes = column.rows()
        found = super().forward(column.gather(input_, sizes))
        return tensor_model_parallel_all_reduce(column.sum_own(found, sizes))


class SharedLMHead(ParallelLMHead, _SharedVocabulary):
    """Holds its part of the vocabulary; :class:`SharedLogits` computes with it."""

    component = "lm_head"

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> Any:
        """The embedding's weights become this layer's: they are counted there."""
        shared().weight_bytes[self.component] = 0
        return super().tie_weights(embed_tokens)


class SharedLogits(LogitsProcessor):
    """Logits of this replica's rows over the tensor parallel rank's part of the vocabulary, made by a whole column."""

    def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
        rounds = shared().rounds
        if rounds is None:
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        return self._round(lm_head, hidden_states, embedding_bias, rounds.rows(len(hidden_states)))

    def finish(self, lm_head: Any, no_rows: Tensor) -> None:
        """Take part in what is left of a step's rounds; *no_rows* is [0, hidden size], of the model's type."""
        rounds = shared().rounds
        while rounds is not None and rounds.open:
            sizes = rounds.rows(0, done=True)
            if sum(sizes):
                self._round(lm_head, no_rows, None, sizes)

    def _round(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None, sizes: list[int]) -> Tensor:
        column = lm_head.column
        part = super()._apply_head(lm_head, column.gather(hidden_states, sizes), embedding_bias)
        return column.join(part, sizes)


@functools.cache
def register() -> None:
    """Put these layers in place of vLLM's; once a process.

    Raises:
        HookGone: vLLM's layers are not what they were in 0.32.
    """
    check_hooks()
    QKVParallelLinear.register_oot(SharedQKV)
    MergedColumnParallelLinear.register_oot(SharedGateUp)
    RowParallelLinear.register_oot(SharedRow)
    VocabParallelEmbedding.register_oot(SharedEmbedding)
    ParallelLMHead.register_oot(SharedLMHead)
    LogitsProcessor.register_oot(SharedLogits)


def check_hooks() -> None:
    """Whether vLLM still has what this file attaches to.

    Raises:
        HookGone: it has not; the message names the place.
    """
    for owner, name in (
        (LinearBase, "register_oot"),
        (LinearBase, "update_param_tp_status"),
        (LogitsProcessor, "_apply_head"),
    ):
        if not hasattr(owner, name):
            raise HookGone(f"vllm's {owner.__name__}.{name} is gone: replicas cannot share the weights of components")
    if "parallel_group" not in inspect.signature(VocabParallelEmbedding.__init__).parameters:
        raise HookGone("vllm's VocabParallelEmbedding takes no parallel_group any more: replicas cannot share it")
    for layer in (QKVParallelLinear, MergedColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding):
        if layer.__name__ in op_registry_oot:
            raise HookGone(f"{layer.__name__} is replaced by another plugin already: replicas cannot share it")
