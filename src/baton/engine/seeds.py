"""Requests with a seed whose prompt is computed in chunks, on CPU: draws that were made for a chunk are taken back.

Works around: ``GPUModelRunner._bookkeeping_sync`` (vllm 0.32, v1/worker/gpu_model_runner.py) takes back the draw that
was made for a chunk by setting the generator's offset, which torch's generators on CPU don't have: RuntimeError, and
the engine is dead for all of its requests.
Can go when: torch has offsets on CPU, or vLLM keeps a generator's state instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from baton.engine.workarounds import HookGone

_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"


def has_offset() -> bool:
    """Whether torch's generators on CPU can take a draw back as vLLM does it."""
    import torch

    try:
        torch.Generator(device="cpu").get_offset()
    except RuntimeError:
        return False
    return True


def with_states(stock: type) -> type:
    """A subclass of vLLM's CPU model runner that takes draws back by their generator's state.

    Raises:
        HookGone: the runner no longer does what this attaches to.
    """
    for name in ("_sample", "_bookkeeping_sync"):
        if not hasattr(stock, name):
            raise HookGone(f"{_RUNNER}.{name} is gone: seeded requests in chunks could end a CPU engine")
    if "discard_request_mask" not in inspect.getsource(stock._bookkeeping_sync):  # type: ignore[attr-defined]
        raise HookGone(f"{_RUNNER}.discard_request_mask is gone: seeded requests in chunks could end a CPU engine")

    class SeededChunksRunner(stock):
        """vLLM's CPU model runner."""

        _before: Mapping[int, tuple[Any, Any]] = {}
        """Of requests whose draw does not count, by their place: the generator, and its state before the draw."""

        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            made, mask = self.input_batch.generators, self.discard_request_mask.np
            self._before = {place: (each, each.get_state()) for place, each in made.items() if mask[place]}
            return super()._sample(*args, **kwargs)

        def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
            made, before = self.input_batch.generators, self._before
            self._before = {}
            self.input_batch.generators = {place: each for place, each in made.items() if place not in before}
            try:
                return super()._bookkeeping_sync(*args, **kwargs)
            finally:
                self.input_batch.generators = made
                for generator, state in before.values():
                    generator.set_state(state)

    return SeededChunksRunner


def mend() -> None:
    """Have workers of this process, and of those forked from it, make such a runner."""
    from vllm.v1.worker import cpu_model_runner

    if cpu_model_runner.CPUModelRunner.__module__ != __name__:
        vars(cpu_model_runner)["CPUModelRunner"] = with_states(cpu_model_runner.CPUModelRunner)
