"""Drafts of data-parallel ranks that idle: their dummy steps must not write into the draft's KV cache.

Works around: ``SpecDecodeBaseProposer.dummy_run`` (vllm 0.32, v1/spec_decode/llm_base_proposer.py) runs the draft with
the slots of its last real step still in its buffer, where the target's dummy step has none (-1). A rank that steps
along with another one then writes keys and values of nothing at slots that may be a request's by now, perhaps one whose
KV cache is just arriving from a prefill server, and its drafts are refused: right answers, but slower.
Can go when: dummy_run fills the buffer itself.
"""

from __future__ import annotations

import sys
from typing import Any

from baton.engine.workarounds import HookGone

_RUNNER = "vllm.v1.worker.gpu_model_runner"


def mend() -> None:
    """Have model runners of this process, and of those forked from it, make a proposer that leaves the cache alone.

    Raises:
        HookGone: there is no such method or buffer any more.
    """
    from vllm.v1.spec_decode import eagle
    from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

    stock = eagle.EagleProposer
    if stock.__module__ == __name__:
        return
    if not hasattr(stock, "dummy_run"):
        raise HookGone("vllm.v1.spec_decode.eagle.EagleProposer.dummy_run is gone: see baton/engine/drafts.py")

    class EagleProposer(stock):  # type: ignore[misc, valid-type]
        """vLLM's, whose dummy steps write nowhere."""

        def dummy_run(self, *args: Any, **kwargs: Any) -> None:
            self._slot_mapping_buffer.fill_(PADDING_SLOT_ID)
            super().dummy_run(*args, **kwargs)

    # A runner that is imported later takes the name from where the class is; one that is there has taken it.
    for module in (eagle, sys.modules.get(_RUNNER)):
        if module is not None:
            vars(module)["EagleProposer"] = EagleProposer
