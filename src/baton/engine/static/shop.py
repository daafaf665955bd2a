"""Makes the graphs of one worker: taken from the store, or compiled and kept."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from baton.engine.static.graphs import OPTIONS, Held, compile_traced, trace
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
    """A compiled function of a few tensors, whose module is already handed in."""

    def __init__(self, artifact: Any, used: Sequence[int], held: Held) -> None:
        """
        Args:
            used: which of the held tensors and of the inputs behind them the artifact takes.
        """
        self._artifact, self._used = artifact, used
        count = len(held.tensors)
        self._held = [held.tensors[index] for index in used if index < count]
        self._takes = [index - count for index in used if index >= count]

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        return list(self._artifact(*self._held, *(inputs[index] for index in self._takes)))

    def of(self, held: Held) -> Graph:
        """The same of another module that holds tensors of the same shapes."""
        return Graph(self._artifact, self._used, held)


class Shop:
    """Graphs of one model."""

    def __init__(self, model: torch.nn.Module, depends_on: dict[str, Any], store: Store | None = None) -> None:
        """
        Args:
            depends_on: what graphs depend on beside torch, the CPU and the shapes of weights.
        """
        self.counts = Counts()
        self._model = model
        self._held: Held | None = None
        self._store = store or Store(folder(os.environ))
        self._store.open()
        self._depends_on = {
            **depends_on,
            "torch": torch.__version__,
            "options": OPTIONS,
            "cpu": cpu_of(Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else "",
            "capability": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
        }

    def make(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        *,
        held: Held | None = None,
        rewrites: Sequence[Callable[[torch.fx.GraphModule], None]] = (),
    ) -> Graph:
        """The graph of *function* (a module-level one, of the module and tensors), run once with *inputs*.

        Args:
            name: says which function it is, in the key.
            inputs: shaped as all later ones.
            held: of the module; the whole model without.
            rewrites: applied to the traced graph before it is compiled.
        """
        since = time.perf_counter()
        if held is None:
            held = self._held = self._held or Held(self._model)
        shapes = [[list(each.shape), str(each.dtype)] for each in inputs]
        parts = {
            "name": name,
            "inputs": shapes,
            "held": held.shapes(),
            "rewrites": [each.__name__ for each in rewrites],
        }
        key = key_of({**self._depends_on, **parts})
        with _kernels_in(self._store.kernels):
            graph = self._load(key, held, inputs)
            if graph is not None:
                self.counts.loaded += 1
            else:
                graph = self._compile(key, function, held, inputs, rewrites)
                self.counts.compiled += 1
        self.counts.seconds += time.perf_counter() - since
        return graph

    def recall(self, parts: dict[str, Any], find: Callable[[], list[str]]) -> list[str]:
        """What *find* found when it was last asked about *parts*, also in another process."""
        key = key_of({**self._depends_on, **parts})
        data = self._store.read(key)
        if data is not None:
            return list(json.loads(data))
        found = find()
        self._store.write(key, json.dumps(found).encode())
        return found

    def _load(self, key: str, held: Held, inputs: Sequence[torch.Tensor]) -> Graph | None:
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        data = self._store.read(key)
        if data is None:
            return None
        try:
            used, _, artifact = data.partition(b"\n")
            graph = Graph(AOTCompiledArtifact.deserialize(artifact), json.loads(used), held)
            graph(*inputs)
        except Exception as error:  # whatever unpickling and loading find
            logger.warning("static shapes: a stored graph cannot be used (%s): it is compiled again", error)
            self._store.remove(key)
            return None
        return graph

    def _compile(
        self,
        key: str,
        function: Callable[..., Any],
        held: Held,
        inputs: Sequence[torch.Tensor],
        rewrites: Sequence[Callable[[torch.fx.GraphModule], None]],
    ) -> Graph:
        traced, baked = trace(held, function, inputs)
        for rewrite in rewrites:
            rewrite(traced)
        artifact, used = compile_traced(traced, [*held.tensors, *inputs])
        graph = Graph(artifact, used, held)
        graph(*inputs)
        if baked:
            logger.warning("static shapes: a graph with tensors of its own (%s) is not kept on disk", ", ".join(baked))
        else:
            self._store.write(key, json.dumps(used).encode() + b"\n" + artifact.serialize())
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
