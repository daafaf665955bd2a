"""A model's decoder layers, run by one graph for all that are alike.

A model of thirty layers is the same layer thirty times with other weights: its graph is compiled once a size, and
called with each layer's weights. What is around the layers (embedding, last norm) runs as vLLM has it. Which layers are
alike is what their traces say, so that one which is built otherwise has a graph of its own.

Touches, of vllm 0.32: decoder layers of (positions, hidden_states, residual) in a ``ModuleList``, as in
model_executor/models/llama.py, and ``Attention.layer_name``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from baton.engine.static.graphs import Held, trace
from baton.engine.static.ops import now, share
from baton.engine.static.shop import Graph, Shop
from baton.engine.static.store import key_of

Rewrite = Callable[[torch.fx.GraphModule], None]

BEGINS = "begins"
"""The kind of a first layer that cannot do with a residual of zeros."""

_TAKES = ["self", "positions", "hidden_states", "residual"]


class Layer:
    """In the place of a decoder layer's forward: its graph for a step's rows, or else the layer itself."""

    def __init__(self, module: torch.nn.Module, attention: str) -> None:
        self.module, self.attention, self.held = module, attention, Held(module)
        self.graphs: dict[int, Graph] = {}
        """By rows."""

        self.begins = False
        """Whether its graph is one of its own, that begins the residual stream."""

    def __call__(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        graph = self.graphs.get(len(hidden_states)) if now.rows is not None else None
        if graph is None:
            return forward_of(self.module, positions, hidden_states, residual)
        now.layer = self.attention
        if self.begins:
            return tuple(graph(positions, hidden_states))
        return tuple(graph(positions, hidden_states, torch.zeros_like(hidden_states) if residual is None else residual))


def forward_of(
    module: Any, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The layer's own forward; by its class, since an instance's may be replaced by ours."""
    return tuple(type(module).forward(module, positions, hidden_states, residual))


class Layers:
    """All decoder layers of a model."""

    def __init__(self, layers: list[Layer], shop: Shop) -> None:
        self._layers, self._shop = layers, shop
        self._kinds: list[str] = []

    def make(self, positions: torch.Tensor, hidden_states: torch.Tensor, rewrites: Sequence[Rewrite] = ()) -> None:
        """Make the graphs for steps of as many rows as *positions* and *hidden_states* have.

        Args:
            rewrites: see :meth:`Shop.make`.
        """
        if not self._kinds:
            self._kinds = self._alike(positions, hidden_states)
            self._layers[0].begins = self._kinds[0] == BEGINS
        made: dict[str, Graph] = {}
        for layer, kind in zip(self._layers, self._kinds, strict=True):
            now.layer = layer.attention
            graph = made.get(kind)
            if graph is None:
                # One tensor twice would be one input.
                residual = [] if layer.begins else [torch.zeros_like(hidden_states)]
                graph = made[kind] = self._shop.make(
                    "layer",
                    forward_of,
                    [positions, hidden_states, *residual],
                    held=layer.held,
                    rewrites=(share, *rewrites),
                )
            layer.graphs[len(positions)] = graph.of(layer.held)

    def install(self) -> None:
        """Have the model call them."""
        for layer in self._layers:
            layer.module.forward = layer

    def _alike(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> list[str]:
        """A name for each layer, the same for those that one graph can serve."""

        def names() -> list[str]:
            first, *others = (self._name(layer, positions, hidden_states) for layer in self._layers)
            return [first if self._may_begin_with_zeros(positions, hidden_states) else BEGINS, *others]

        held = [layer.held.shapes() for layer in self._layers]
        return self._shop.recall({"name": "alike", "held": held}, names)

    def _name(self, layer: Layer, positions: torch.Tensor, hidden_states: torch.Tensor) -> str:
        traced, baked = trace(layer.held, forward_of, [positions, hidden_states, torch.zeros_like(hidden_states)])
        share(traced)
        alone = layer.attention if baked else ""
        return key_of({"graph": str(traced.graph), "held": layer.held.shapes(), "alone": alone})

    def _may_begin_with_zeros(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> bool:
        """Whether the first layer gives the same to the last bit with a residual of zeros as with none.

        Not tried with tensor parallel ranks: each would have to run it, and one may know the answer from another time.
        """
        layer, hidden = self._layers[0], torch.randn_like(hidden_states)
        now.layer = layer.attention
        made = []
        for inputs in ([positions, hidden], [positions, hidden, torch.zeros_like(hidden)]):
            traced, _ = trace(layer.held, forward_of, inputs)
            share(traced)
            if any("all_reduce" in str(node.target) for node in traced.graph.nodes):
                return False
            made.append(traced(*layer.held.tensors, *inputs))
        return len(made[0]) == len(made[1]) and all(map(torch.equal, *made))


def layers_of(model: torch.nn.Module, shop: Shop) -> Layers | None:
    """The decoder layers of *model*, or None when it has none that one can call alone."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) > 1:
            names = [_attention_of(layer) for layer in module]
            if all(names):
                return Layers([Layer(layer, str(name)) for layer, name in zip(module, names, strict=True)], shop)
    return None


def _attention_of(layer: torch.nn.Module) -> str | None:
    """The name of the one attention of *layer*; None if it has another number, or is called in another way."""
    if list(inspect.signature(type(layer).forward).parameters) != _TAKES:
        return None
    found = [each.layer_name for each in layer.modules() if isinstance(each, Attention)]
    return found[0] if len(found) == 1 else None
