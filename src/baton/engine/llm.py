"""vLLM's engine client with a look at what passes: the door learns each request's ticket from it."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from baton.engine.door import CURRENT


class BatonAsyncLLM(AsyncLLM):
    """`AsyncLLM` (vllm 0.32, v1/engine/async_llm.py) whose outputs the door sees, when the request carried a ticket."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        outputs, outcome = super().generate(*args, **kwargs), CURRENT.get()
        return outputs if outcome is None else outcome.watch(outputs)
