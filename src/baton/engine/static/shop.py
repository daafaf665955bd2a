"""Makes the graphs of one worker: taken from the store, or compiled and kept."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.static.graphs import OPTIONS, Held, compile_graph
from baton.engine.static.store import INDUCTOR, Store, cpu_of, folder, key_of

logger = logging.getLogger("vllm.baton")


@dataclass
class Counts:
    """Graphs of this process, and what making them took.

    Attributes:
        compiled, loaded: how many were compiled, and how many came from the store.
        seconds: for all of them.
    """

    compiled: int = 0
    loaded: int = 0
    seconds: float = 0.0


class Graph:
    """A compiled function of a few tensors, whose model is already handed in."""

    def __init__(self, artifact: Any, held: Sequence[torch.Tensor]) -> None:
        self._artifact = artifact
        self._held = held

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(self._artifact(*self._held, *inputs))


class Shop:
    """Graphs of one model."""

    def __init__(self, model: torch.nn.Module, depends_on: dict[str, Any], store: Store | None = None) -> None:
        """
        Args:
            depends_on: what graphs depend on beside torch, the CPU and the shapes of weights.
        """
        self.counts = Counts()
        self._held = Held(model)
        self._store = store or Store(folder(os.environ))
        self._store.open()
        self._depends_on = {
            **depends_on,
            "torch": torch.__version__,
            "options": OPTIONS,
            "cpu": cpu_of(Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else "",
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "held": self._held.shapes(),
        }

    def make(self, name: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Graph:
        """The graph of *function* (a module-level one, of the model and tensors), run once with *inputs*.

        Args:
            name: says which function it is, in the key.
            inputs: shaped as all later ones.
        """
        since = time.perf_counter()
        shapes = [[list(each.shape), str(each.dtype)] for each in inputs]
        key = key_of({**self._depends_on, "name": name, "inputs": shapes})
        with _kernels_in(self._store.kernels):
            graph = self._load(key, inputs)
            if graph is not None:
                self.counts.loaded += 1
            else:
                graph = self._compile(key, function, inputs)
                self.counts.compiled += 1
        self.counts.seconds += time.perf_counter() - since
        return graph

    def _load(self, key: str, inputs: Sequence[torch.Tensor]) -> Graph | None:
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        data = self._store.read(key)
        if data is None:
            return None
        try:
            graph = Graph(AOTCompiledArtifact.deserialize(data), self._held.tensors)
            graph(*inputs)
        except Exception as error:  # whatever unpickling and loading find
            logger.warning("static shapes: a stored graph cannot be used (%s): it is compiled again", error)
            self._store.remove(key)
            return None
        return graph

    def _compile(self, key: str, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Graph:
        artifact, baked = compile_graph(self._held, function, inputs)
        graph = Graph(artifact, self._held.tensors)
        graph(*inputs)
        if baked:
            logger.warning("static shapes: a graph with tensors of its own (%s) is not kept on disk", ", ".join(baked))
        else:
            self._store.write(key, artifact.serialize())
        return graph


@contextlib.contextmanager
def _kernels_in(folder: Path) -> Iterator[None]:
    """Inductor compiles into *folder*, and looks there."""
    before = os.environ.get(INDUCTOR)
    os.environ[INDUCTOR] = str(folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(INDUCTOR, None)
        else:
            os.environ[INDUCTOR] = before
