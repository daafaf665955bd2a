"""Operations inside graphs that find out only when they run what a graph must not know: which layer, how many rows.

A graph of fixed shapes serves all layers that are alike, so attention asks here for the layer under way; and it is the
same for any step that fits in it, so matrix products leave out the rows that only fill it up, as attention does.

Touches, of vllm 0.32: ``unified_attention_with_output`` and ``unified_kv_cache_update``
(model_executor/layers/attention/attention.py), and ``_C.onednn_mm`` (_custom_ops.py).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output, unified_kv_cache_update
from vllm.utils.torch_utils import direct_register_custom_op


class _Now:
    """What is under way in this process: one step of one model, in one thread."""

    layer = ""
    """Name of the attention of the layer under way."""

    rows: int | None = None
    """True rows of the step; None outside of graphs."""


now = _Now()


@contextlib.contextmanager
def step_of(rows: int) -> Iterator[None]:
    """A step of *rows* true rows is under way, in graphs."""
    now.rows = rows
    try:
        yield
    finally:
        now.rows = None


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, keep: bool) -> None:
    """Attention of the layer under way.

    Args:
        query, output: (rows, heads, head size).
        key, value: (rows, key-value heads, head size).
        keep: whether keys and values are put into the cache first.
    """
    if get_forward_context().attn_metadata is None:
        # A graph that is being made: vLLM's would leave it as it is.
        output.zero_()
        return
    if keep:
        unified_kv_cache_update(key, value, now.layer)
    unified_attention_with_output(query, key, value, output, now.layer)


def linear(output: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, handler: torch.Tensor) -> None:
    """The matrix product of the true rows; the others are 0.

    Args:
        output: (rows, columns).
        x: (rows, inner size).
        handler: oneDNN's packed weights, as a number.
    """
    rows = now.rows
    if rows is None or rows >= len(x):
        torch.ops._C.onednn_mm(output, x, bias, handler)
        return
    torch.ops._C.onednn_mm(output[:rows], x[:rows], bias, handler)
    output[rows:].zero_()


_LIBRARY = torch.library.Library("baton", "FRAGMENT")
direct_register_custom_op("attention", attention, ["output"], lambda *_: None, _LIBRARY)
direct_register_custom_op("linear", linear, ["output"], lambda *_: None, _LIBRARY)


def share(traced: fx.GraphModule) -> None:
    """Let attention in *traced* be that of the layer under way, instead of one layer's by its name."""
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.vllm.unified_attention_with_output.default:
            continue
        given = _given(node)
        if given.get("output_scale") is not None or given.get("output_block_scale") is not None:
            continue
        update = given.get("kv_cache_dummy_dep")
        with traced.graph.inserting_before(node):
            inputs = (given["query"], given["key"], given["value"], given["output"], update is not None)
            traced.graph.call_function(torch.ops.baton.attention.default, inputs)
        traced.graph.erase_node(node)
        if update is not None and not update.users:
            traced.graph.erase_node(update)
    traced.recompile()


def cut(traced: fx.GraphModule) -> None:
    """Let matrix products in *traced* leave out the rows that fill a step up."""
    stock = getattr(torch.ops._C, "onednn_mm", None)
    for node in traced.graph.nodes:
        if stock is not None and node.target is stock.default:
            node.target = torch.ops.baton.linear.default
    traced.recompile()


def _given(node: fx.Node) -> dict[str, Any]:
    """A node's arguments by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
