"""One compiled graph for each size: a function of fixed shapes, its weights handed in at each call.

A graph is traced with fake tensors (no weight is touched), compiled by Inductor with static shapes, and can be stored:
nothing in it belongs to this process, since whatever the model holds is an input. vLLM's attention stays one opaque
operation in it, which finds its metadata and KV cache in the forward context: lengths of contexts are no shapes.

Touches, of vllm 0.32: ``layer.cpu_linear`` (model_executor/layers/utils.py ``dispatch_cpu_unquantized_gemm``), a
closure over a handle to packed weights, which is made an input as well. Of torch 2.13: ``make_fx`` and
``standalone_compile`` and ``AsyncCompile.use_process_pool``.
"""

from __future__ import annotations

import contextlib
import os
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

OPTIONS = {
    "dce": True,
    "size_asserts": False,
    "nan_asserts": False,
    "epilogue_fusion": True,
    "cpp.dynamic_threads": True,
    "fx_graph_cache": True,
}
"""Inductor's, as vLLM has them on CPU (vllm 0.32, platforms/cpu.py)."""


class Held:
    """Whatever tensors a module holds: parameters, buffers, and handles in closures; in one fixed order."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        named = [*module.named_parameters(), *module.named_buffers()]
        self.names = [name for name, _ in named]
        self._places = _places(module, [tensor for _, tensor in named])
        self._cells = list(_cells(module))
        tensors = [tensor for _, tensor in named] + [_read(cell) for _, cell in self._cells]
        self.tensors: list[torch.Tensor] = [tensor.detach() for tensor in tensors]

    def shapes(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], str]]:
        """Name, shape, strides and type of each: what a compiled graph relies on."""
        names = [*self.names, *(name for name, _ in self._cells)]
        return [
            (name, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
            for name, tensor in zip(names, self.tensors, strict=True)
        ]

    def bind(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """*function* of the module and more tensors, as one of the held tensors and those.

        torch's own way to find a tensor's places (``tie_weights``, torch 2.13) is not taken: a module that stands at
        two of them, as one rotary embedding in all layers, would keep the tensors of the call for good.
        """
        count = len(self.tensors)

        def bound(*flat: torch.Tensor) -> Any:
            held, more = flat[:count], flat[count:]
            named = {f"module.{name}": held[index] for name, index in self._places}
            with _swapped(self._cells, held[len(self.names) :]):
                return torch.func.functional_call(_Call(self.module, function), named, more, tie_weights=False)

        return bound


class _Call(torch.nn.Module):
    """A function of a module, as a module's forward."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.module, *inputs)


def trace(
    held: Held, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, list[str]]:
    """*function* of the module and of tensors shaped as *inputs*, as a graph of the held tensors and those.

    Returns:
        the graph, and the names of tensors that are baked into it.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    bound = _listed(held.bind(function))
    with torch.no_grad():
        traced = make_fx(bound, tracing_mode="fake", _allow_non_fake_inputs=True)(*held.tensors, *inputs)
    return traced, _own_tensors(traced)


def compile_traced(traced: torch.fx.GraphModule, flat: Sequence[torch.Tensor]) -> tuple[Any, list[int]]:
    """A graph compiled for the shapes of *flat*, its inputs.

    Returns:
        torch's artifact, and which of the inputs it takes: those that it computes with.
    """
    from torch._inductor import standalone_compile

    places = [node for node in traced.graph.nodes if node.op == "placeholder"]
    used = [index for index, node in enumerate(places) if node.users]
    for node in places:
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    options = {"config_patches": dict(OPTIONS)}
    with torch.no_grad(), _all_cores():
        artifact = standalone_compile(
            traced,
            [flat[index] for index in used],
            dynamic_shapes="from_example_inputs",
            options=options,
            aot=True,
            donate_graph_module=True,
        )
    return artifact, used


@contextlib.contextmanager
def _all_cores() -> Iterator[None]:
    """Kernels are compiled beside each other, by threads that wait for the compiler.

    vLLM has one at a time, since its workers may not have children of multiprocessing's (vllm 0.32, platforms/cpu.py,
    ``TORCHINDUCTOR_COMPILE_THREADS``). Kernels for a CPU need none (torch 2.13, _inductor/async_compile.py
    ``cpp_pybinding``), and the pool that torch would start for others is kept away.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile

    stock = vars(AsyncCompile)["use_process_pool"]
    AsyncCompile.use_process_pool = classmethod(lambda _: False)
    try:
        with config.patch(compile_threads=max(len(os.sched_getaffinity(0)), 1)):
            yield
    finally:
        AsyncCompile.use_process_pool = stock


def _listed(function: Callable[..., Any]) -> Callable[..., list[torch.Tensor]]:
    def listed(*flat: torch.Tensor) -> list[torch.Tensor]:
        made = function(*flat)
        return list(made) if isinstance(made, tuple | list) else [made]

    return listed


def _own_tensors(traced: torch.fx.GraphModule) -> list[str]:
    """Tensors that were found on the way and baked in: nobody can say what they mean in another process."""
    names = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    return sorted(name for name in names if isinstance(getattr(traced, name, None), torch.Tensor))


def _places(module: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> list[tuple[str, int]]:
    """Where each of *tensors* stands, as a name and its index: at each place once, also when modules share it."""
    indices = {id(tensor): index for index, tensor in enumerate(tensors)}
    found = []
    for prefix, layer in module.named_modules():
        own = {"recurse": False, "remove_duplicate": False}
        for name, tensor in (*layer.named_parameters(prefix, **own), *layer.named_buffers(prefix, **own)):
            found.append((name, indices[id(tensor)]))
    return found


def _cells(module: torch.nn.Module) -> Iterator[tuple[str, types.CellType]]:
    """Cells of ``cpu_linear`` closures that hold a tensor, or a handle with one."""
    for name, layer in module.named_modules():
        for index, cell in enumerate(getattr(getattr(layer, "cpu_linear", None), "__closure__", None) or ()):
            with contextlib.suppress(ValueError):  # an empty one
                if _read(cell) is not None:
                    yield f"{name}.cpu_linear[{index}]", cell


def _read(cell: types.CellType) -> Any:
    content = cell.cell_contents
    found = content if isinstance(content, torch.Tensor) else getattr(content, "handler_tensor", None)
    return found if isinstance(found, torch.Tensor) else None


@contextlib.contextmanager
def _swapped(cells: Sequence[tuple[str, types.CellType]], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """*cells* with *tensors* in them for a while."""
    before = [_read(cell) for _, cell in cells]
    _write(cells, tensors)
    try:
        yield
    finally:
        _write(cells, before)


def _write(cells: Sequence[tuple[str, types.CellType]], tensors: Sequence[Any]) -> None:
    for (_, cell), tensor in zip(cells, tensors, strict=True):
        if isinstance(cell.cell_contents, torch.Tensor):
            cell.cell_contents = tensor
        else:
            cell.cell_contents.handler_tensor = tensor
