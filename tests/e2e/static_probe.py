"""An engine in one process, whose logits and KV cache are looked at: run as `static_probe.py MODEL OUT padded|stock`.

Requests run one at a time, so that both engines give their blocks out alike. OUT gets, for each prompt, the logits of
its steps and the whole KV cache after it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128)
"""In tokens, around blocks (32) and buckets (32, 64, 128)."""

TOKENS_OUT = 4


def main(model: str, out: Path, mode: str) -> None:
    os.environ |= {"BATON_ENGINE": "1", "BATON_STATIC_SHAPES": str(int(mode == "padded"))}
    from baton.engine import EngineSettings, workarounds

    workarounds.apply(EngineSettings.read(os.environ))
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        dtype="float32",
        block_size=32,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=False,
        enforce_eager=True,
        distributed_executor_backend="uni",
    )
    runner: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    compute, logits, rows = runner.model.compute_logits, [], set()

    def recorded(hidden: Any, *args: Any, **kwargs: Any) -> Any:
        logits.append(compute(hidden, *args, **kwargs).clone())
        return logits[-1]

    def forward(*args: Any, **kwargs: Any) -> Any:
        rows.add(len(kwargs["input_ids"]))
        return stock(*args, **kwargs)

    stock, runner._model_forward = runner._model_forward, forward
    runner.model.compute_logits = recorded
    seen = []
    for length in LENGTHS:
        logits.clear()
        prompt = [10 + (7 * place + length) % 80 for place in range(length)]
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS_OUT, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        cache = torch.stack([layer.clone() for layer in runner.kv_caches])
        seen.append({"tokens": list(answer.outputs[0].token_ids), "logits": torch.cat(logits), "cache": cache})
    torch.save({"seen": seen, "rows": sorted(rows)}, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
