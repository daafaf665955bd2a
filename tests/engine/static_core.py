"""vLLM's engine core in this process, without servers, on a model of two small layers: run by test_static_core.py.

Prints JSON: by engine (stock, padded, graphs, and graphs again from the store) its answers, and what was compared.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

LENGTHS = (1, 5, 31, 32, 33, 63, 64, 65, 100)
"""In tokens, around blocks (32) and buckets (32, 64)."""

TOKENS_OUT = 5


class Core:
    """One engine, that remembers the rows of its steps and its logits."""

    def __init__(
        self, model: str, *, static: bool, eager: bool, decodes: bool = False, ahead: bool = False, tokens: int = 64
    ) -> None:
        """
        Args:
            decodes: whether it is a decode server that takes KV caches from the fake connector's shelf.
            ahead: whether a step is scheduled while the one before it runs.
            tokens: of the longest step.
        """
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        from baton.engine.static.setup import ASYNC_SCHEDULER

        buckets = {"num_batched_tokens_buckets": [32, 64], "num_seqs_buckets": [1, 4]}
        config = EngineArgs(
            model=model,
            dtype="float32",
            block_size=32,
            max_model_len=256,
            max_num_seqs=4,
            max_num_batched_tokens=tokens,
            kv_cache_memory_bytes=1 << 22,
            enable_prefix_caching=False,
            enforce_eager=eager,
            distributed_executor_backend="uni",
            additional_config={"baton_config": buckets} if static else {},
            kv_transfer_config=KVTransferConfig(
                kv_connector="FakeConnector",
                kv_connector_module_path="tests.engine.fake_connector",
                kv_role="kv_consumer",
                kv_load_failure_policy="recompute",
            )
            if decodes
            else None,
        ).create_engine_config()
        if ahead:
            # vLLM's CPU platform takes it back, and its runner asks for CUDA's streams.
            config.scheduler_config.async_scheduling = True
            config.scheduler_config.scheduler_cls = ASYNC_SCHEDULER
            _without_streams()
        self.decodes = decodes
        self.core = EngineCore(config, UniProcExecutor, log_stats=False)
        self.runner: Any = self.core.model_executor.driver_worker.worker.model_runner
        self.rows: list[int] = []
        self.logits: list[Any] = []
        self.blocks: list[int] = []
        """Of the first request in the last step."""
        forward, compute = self.runner._model_forward, self.runner.model.compute_logits

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.rows.append(len(kwargs["input_ids"]))
            first = self.runner.input_batch.block_table[0]
            self.blocks = first.block_table.np[0, : first.num_blocks_per_row[0]].tolist()
            return forward(*args, **kwargs)

        def recorded(hidden: Any, *args: Any, **kwargs: Any) -> Any:
            self.logits.append(compute(hidden, *args, **kwargs))
            return self.logits[-1]

        self.runner._model_forward = counted
        self.runner.model.compute_logits = recorded

    def answers(self, lengths: Any, at_once: int, *, regex: str = "", **sampling: Any) -> list[list[int]]:
        """The answers to prompts of *lengths*; *at_once* are added before the engine runs to the end.

        Args:
            regex: what every second answer has to match.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams
        from vllm.v1.request import Request

        made: dict[str, list[int]] = {}
        asked = [[10 + (7 * place + length) % 80 for place in range(length)] for length in lengths]
        for start in range(0, len(asked), at_once):
            for number, prompt in enumerate(asked[start : start + at_once], start):
                params = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS_OUT, "ignore_eos": True, **sampling})
                if regex and number % 2:
                    params.structured_outputs = StructuredOutputsParams(regex=regex)
                    # vLLM's front end chooses it as it checks the request.
                    params.structured_outputs._backend = "xgrammar"
                made[str(number)] = []
                request = Request(str(number), prompt, params, None)
                if self.decodes:
                    request.kv_transfer_params = {"do_remote_prefill": True}
                self.core.structured_output_manager.grammar_init(request)
                self.core.add_request(request)
            while self.core.scheduler.has_unfinished_requests() or self.core.batch_queue:
                outputs, _ = self.core.step_fn()
                for each in (outputs or {}).values():
                    for output in each.outputs:
                        made[output.request_id] += output.new_token_ids
        return list(made.values())

    def cache(self) -> Any:
        """(layers, blocks, heads, tokens of a block, 2 x head size) of keys and values."""
        import torch

        return torch.stack([layer.clone() for layer in self.runner.kv_caches])

    def counts(self) -> list[int]:
        made = getattr(self.runner, "graph_counts", None)
        return [made.compiled, made.loaded] if made is not None else [0, 0]


def _without_streams() -> None:
    """Let work on CUDA's streams be done at once, as everything is on a CPU."""
    import contextlib
    from types import SimpleNamespace

    import torch

    def idle(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(**dict.fromkeys(("record", "synchronize", "wait_stream", "wait"), lambda *_: None))

    for name in ("Event", "Stream", "current_stream"):
        setattr(torch.cuda, name, idle)
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment, misc]


def shelve(stock: Core) -> None:
    """Put the KV cache of every prompt on the shelf, as a prefill server leaves it."""
    from tests.engine.fake_connector import SHELF

    for number, length in enumerate(LENGTHS):
        for layer in stock.runner.kv_caches:
            layer.zero_()
        stock.answers([length], 1, max_tokens=1)
        SHELF[str(number)] = stock.cache()[:, stock.blocks]


def compare(stock: Core, padded: Core) -> dict[str, Any]:
    """What padding changed: the largest difference of logits and of real blocks, and foreign blocks written to."""
    worst = {"logits": 0.0, "cache": 0.0, "foreign": 0}
    for length in LENGTHS:
        for core in (stock, padded):
            for layer in core.runner.kv_caches:
                layer.zero_()
            core.logits.clear()
            core.answers([length], 1)
        for theirs, ours in zip(stock.logits, padded.logits, strict=True):
            worst["logits"] = max(worst["logits"], (theirs - ours).abs().max().item())
        theirs, ours = stock.cache()[:, 1:], padded.cache()[:, 1:]
        touched = theirs.flatten(2).abs().sum(dim=(0, 2)) > 0
        worst["foreign"] += int((ours[:, ~touched] != 0).any())
        worst["cache"] = max(worst["cache"], (theirs - ours).abs().max().item())
    return worst


def main() -> None:
    from baton.engine import EngineSettings, workarounds

    workarounds.apply(EngineSettings.read(os.environ))
    from tests.e2e import tiny
    from tests.engine.fake_connector import SHELF

    with tempfile.TemporaryDirectory() as folder:
        os.environ["BATON_GRAPH_CACHE"] = f"{folder}/graphs"
        model = str(tiny.llama(Path(folder) / "model", layers=3, hidden=64, heads=2, kv_heads=1))
        stock = Core(model, static=False, eager=True)
        padded = Core(model, static=True, eager=True)
        told: dict[str, Any] = {
            "compare": compare(stock, padded),
            "stock rows": [*stock.rows],
            "padded rows": [*padded.rows],
        }
        told["before any graph"] = stock.answers(LENGTHS, 1)
        seeded = {"temperature": 1.5, "top_k": 20, "seed": 5}
        told["seeded in one step"] = Core(model, static=False, eager=True, tokens=128).answers([100], 1, **seeded)
        cores = {"stock": stock, "padded": padded}
        for name in ("graphs", "graphs again")[: int(sys.argv[1])]:
            cores[name] = Core(model, static=True, eager=False)
        for name, core in cores.items():
            told[name] = {
                "counts": core.counts(),
                "one by one": core.answers(LENGTHS, 1),
                "together": core.answers(LENGTHS, len(LENGTHS)),
                "top-k 1": core.answers(LENGTHS, 4, temperature=0.8, top_k=1),
                "logprobs": core.answers(LENGTHS, 4, logprobs=2),
                "grammar": core.answers(LENGTHS, 4, regex="[a-f]{9}"),
                "seeded": core.answers([20, 20], 2, **seeded),
                "seeded in chunks": core.answers([100], 1, **seeded),
                "widths": sorted({each.shape[1] for each in core.logits}),
            }
        if len(cores) > 2:
            core = Core(model, static=True, eager=False, ahead=True)
            told["ahead"] = {
                "one by one": core.answers(LENGTHS, 1),
                "together": core.answers(LENGTHS, len(LENGTHS)),
                "top-k 1": core.answers(LENGTHS, 4, temperature=0.8, top_k=1),
                "grammar": core.answers(LENGTHS, 4, regex="[a-f]{9}"),
                "rows": sorted(set(core.rows)),
                "counts": core.counts(),
                "scheduler": type(core.core.scheduler).__name__,
            }
        shelve(stock)
        # Last, since vLLM keeps one connector a process, which all engines would see.
        decode = Core(model, static=True, eager=len(cores) < 3, decodes=True)
        decode.rows.clear()
        told["handed over"] = {
            "one by one": decode.answers(LENGTHS, 1),
            "together": decode.answers(LENGTHS, len(LENGTHS)),
            "rows": sorted(set(decode.rows)),
            "counts": decode.counts(),
        }
        # Prompts that it computes itself, without a graph for them.
        decode.decodes, decode.runner._strict = False, False
        decode.rows.clear()
        told["computed without graphs"] = {
            "one by one": decode.answers(LENGTHS, 1),
            "together": decode.answers(LENGTHS, len(LENGTHS)),
            "rows": sorted(set(decode.rows)),
        }
        for number in range(0, len(LENGTHS), 2):
            del SHELF[str(number)]
        decode.decodes = True
        decode.rows.clear()
        told["not all came"] = {
            "one by one": decode.answers(LENGTHS, 1),
            "together": decode.answers(LENGTHS, len(LENGTHS)),
            "rows": sorted(set(decode.rows)),
        }
    print("TOLD " + json.dumps(told))


if __name__ == "__main__":
    main()
