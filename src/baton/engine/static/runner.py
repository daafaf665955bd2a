"""vLLM's CPU model runner, whose every step has the size of a bucket, and a compiled graph for each of them.

vLLM's runner can pad steps already (for CUDA graphs): it asks how large a step is to be, and cuts its buffers to that.
The rows beyond the true ones write their keys and values into the null block, which nobody reads; attention leaves them
out; and their results are dropped.

Touches, of vllm 0.32 (v1/worker/gpu_model_runner.py): ``_determine_batch_execution_and_padding``,
``_get_slot_mappings``, ``_model_forward``, ``_sample``, ``execute_model``, and the model's ``compute_logits``.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.forward_context import set_forward_context
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from baton.engine.static.buckets import StaticShapes, may_be_padded, padded_tokens, smallest
from baton.engine.static.layers import Layers, Rewrite, layers_of
from baton.engine.static.ops import cut, step_of
from baton.engine.static.sampling import greedy_head, logits_of, random_head, why_not
from baton.engine.static.setup import depends_on, graphs_problem, shapes_of
from baton.engine.static.shop import Graph, Shop
from baton.engine.static.steps import Phase
from baton.engine.static.warmup import Target, phases, targets
from baton.engine.workarounds import HookGone

logger = logging.getLogger("vllm.baton")

NULL_SLOT = 0
"""The first slot of block 0, which vLLM keeps back (vllm 0.32, v1/core/block_pool.py ``null_block``)."""

STRICT = "BATON_STRICT_GRAPHS"
"""Set to 1, a step without a graph is an error instead of a count."""

_HOOKS = (
    *("_determine_batch_execution_and_padding", "_get_slot_mappings", "_model_forward", "_sample"),
    *("uniform_decode_query_len", "use_aux_hidden_state_outputs", "num_prompt_logprobs"),
)


def body(model: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """What a graph computes: hidden states of each row."""
    return model(input_ids=input_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)


class StaticModelRunner(CPUModelRunner):
    """Pads each step to its bucket and runs its graph; see the module."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        for name in _HOOKS:
            if not hasattr(self, name):
                raise HookGone(f"vllm.v1.worker.gpu_model_runner.GPUModelRunner.{name} is gone: static shapes need it")
        self.shapes: StaticShapes = shapes_of(vllm_config)
        transfer = vllm_config.kv_transfer_config
        self.phases = phases(transfer.kv_role if transfer is not None else None, os.environ)
        self._strict = os.environ.get(STRICT) == "1"
        self._bodies: dict[int, Callable[..., list[torch.Tensor]]] = {}
        self._layers: Layers | None = None
        self._true_rows = 0
        self._greedy: dict[int, Graph] = {}
        self._random: dict[int, Graph] = {}
        self._hidden: torch.Tensor | None = None
        self._grammar = False
        self._told: set[str] = set()

    # steps

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, num_scheduled_tokens_np: Any, max_num_scheduled_tokens: int, **more: Any
    ) -> Any:
        self._true_rows = num_tokens
        padded = padded_tokens(
            self.shapes,
            num_tokens=num_tokens,
            num_reqs=num_reqs,
            longest=max_num_scheduled_tokens,
            tokens_a_row=self.uniform_decode_query_len,
            decodes=Phase.DECODE in self.phases,
        )
        return super()._determine_batch_execution_and_padding(
            padded, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **more
        )

    def _get_slot_mappings(
        self, num_tokens_padded: int, num_reqs_padded: int, num_tokens_unpadded: int, ubatch_slices: Any = None
    ) -> Any:
        by_group, by_layer = super()._get_slot_mappings(
            num_tokens_padded, num_reqs_padded, num_tokens_unpadded, ubatch_slices
        )
        for slots in (by_group or {}).values():
            # The layers' mappings are the same tensors.
            slots[num_tokens_unpadded:num_tokens_padded].fill_(NULL_SLOT)
        return by_group, by_layer

    def _model_forward(
        self,
        input_ids: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **more: Any,
    ) -> Any:
        if self._bodies and input_ids is not None and positions is not None and not more:
            graph = self._bodies.get(len(input_ids))
            if graph is not None:
                with step_of(self._true_rows):
                    (hidden,) = graph(input_ids, positions)
                return hidden
            self._miss(f"a step of {len(input_ids)} tokens has no graph in an engine of {', '.join(self.phases)}")
        return super()._model_forward(input_ids, positions, intermediate_tensors, inputs_embeds, **more)

    def _miss(self, what: str) -> None:
        """Count a step that runs without a graph; nothing is ever compiled between requests."""
        if self._strict:
            raise RuntimeError(f"static shapes: {what}")
        self._tell(f"static shapes: {what}: it runs uncompiled")
        self._add("step_uncompiled", 1)

    # sampling

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._grammar = bool(scheduler_output.has_structured_output_requests)
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the place of the model's ``compute_logits``: nothing yet, when the graph samples as well."""
        if self._samples(len(hidden)):
            self._hidden = hidden
            return hidden.new_empty((len(hidden), 0))
        return logits_of(self.model, hidden, *args, **kwargs)

    def _samples(self, rows: int) -> bool:
        """Whether the next tokens come out of a graph."""
        if self.shapes.sampling is None or rows > max(self._greedy, default=0):
            return False
        why = why_not(
            self.input_batch.sampling_metadata,
            rows,
            self.shapes.sampling,
            grammar=self._grammar,
            prompt_logprobs=bool(self.num_prompt_logprobs),
        )
        if why is not None:
            self._tell(f"static shapes: a request asks for {why}: vLLM samples its batch outside the graph")
        return why is None

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        hidden, self._hidden = self._hidden, None
        if hidden is None:
            return super()._sample(logits, spec_decode_metadata)
        metadata, rows = self.input_batch.sampling_metadata, len(hidden)
        graphs = self._greedy if metadata.all_greedy else self._random
        size = smallest(rows, sorted(graphs), "a batch to sample")
        inputs = [_padded(hidden, size)]
        if not metadata.all_greedy:
            inputs += self._random_inputs(metadata, rows, size)
        with step_of(rows):
            (tokens,) = graphs[size](*inputs)
        return SamplerOutput(tokens[:rows].to(torch.int32).unsqueeze(1), logprobs_tensors=None)

    def _random_inputs(self, metadata: Any, rows: int, size: int) -> list[torch.Tensor]:
        """Temperature, top-k, top-p and noise for :func:`random_head`."""
        assert self.shapes.sampling is not None
        width = self._width()
        top_p = metadata.top_p[:rows] if metadata.top_p is not None else torch.ones(rows)
        return [
            _padded(metadata.temperature[:rows].float(), size),
            _padded(metadata.top_k[:rows].clamp(1, width).long(), size, 1),
            _padded(top_p.float(), size, 1),
            torch.empty(size, width).exponential_(),
        ]

    def _width(self) -> int:
        assert self.shapes.sampling is not None
        return int(min(self.shapes.sampling.max_top_k, self.model_config.get_vocab_size()))

    # warm-up

    def warm_up(self) -> None:
        """Make every graph of this engine's role, and run each once.

        Raises:
            RuntimeError: one of them could not be made; the message names its bucket.
        """
        problem = graphs_problem(self.vllm_config) or (
            "the model gives hidden states of other layers too" if self.use_aux_hidden_state_outputs else None
        )
        if problem:
            logger.info("static shapes: steps are padded and run uncompiled: %s", problem)
            return
        shop = Shop(self.model, depends_on(self.vllm_config))
        self._layers = layers_of(self.model, shop)
        if self._layers is None:
            logger.info("static shapes: the model has no layers that can be called alone: each graph is a whole one")
        wanted = targets(self.shapes, self.phases, self.uniform_decode_query_len)
        since, last = time.perf_counter(), len(wanted)
        for count, target in enumerate(wanted, 1):
            try:
                with torch.inference_mode():
                    self._make(shop, target)
            except Exception as error:
                raise RuntimeError(f"static shapes: the graph of the {target.name} failed: {error}") from error
            logger.info(
                "static shapes: graph %d of %d, %s, %.1f s", count, last, target.name, time.perf_counter() - since
            )
        if self._layers is not None:
            self._layers.install()
        self.model.compute_logits = self._logits
        counts = shop.counts
        self.graph_counts = counts
        self._add("graphs_compiled", counts.compiled)
        self._add("graphs_loaded", counts.loaded)
        logger.info(
            "static shapes: ready with %d graphs compiled and %d loaded in %.1f s",
            *(counts.compiled, counts.loaded, time.perf_counter() - since),
        )

    def _make(self, shop: Shop, target: Target) -> None:
        rewrites = self._rewrites(target.rows)
        hidden = torch.zeros(target.rows, self.model_config.get_hidden_size(), dtype=self.dtype)
        if target.rows not in self._bodies:
            inputs = [torch.zeros_like(each[: target.rows]) for each in (self.input_ids.gpu, self.positions)]
            # Without metadata attention does nothing.
            with set_forward_context(None, self.vllm_config, num_tokens=target.rows):
                if self._layers is None:
                    self._bodies[target.rows] = shop.make("body", body, inputs, rewrites=rewrites)
                else:
                    self._layers.make(inputs[1], hidden, rewrites)
                    self._bodies[target.rows] = self._by_layers
        rows = 1 if target.phase is Phase.PREFILL else target.bucket
        if self.shapes.sampling is None or rows in self._greedy:
            return
        if self.vllm_config.parallel_config.tensor_parallel_size > 1 or self.speculative_config is not None:
            self._tell("static shapes: with tensor parallel ranks or drafts vLLM samples outside the graph")
            return
        # A prompt has one row to sample, whose graph is that of a decode server.
        rewrites = self._rewrites(rows)
        hidden = torch.zeros(rows, self.model_config.get_hidden_size(), dtype=self.dtype)
        self._greedy[rows] = shop.make("greedy", greedy_head, [hidden], rewrites=rewrites)
        if not self.shapes.sampling.all_greedy:
            more = [torch.ones(rows), torch.ones(rows, dtype=torch.int64), torch.ones(rows)]
            more.append(torch.ones(rows, self._width()))
            self._random[rows] = shop.make("random", random_head, [hidden, *more], rewrites=rewrites)

    def _rewrites(self, rows: int) -> tuple[Rewrite, ...]:
        return (cut,) if may_be_padded(rows, self.shapes, self.uniform_decode_query_len) else ()

    def _by_layers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        return [body(self.model, input_ids, positions)]

    # telling

    def _tell(self, what: str) -> None:
        """Say it once."""
        if what not in self._told:
            self._told.add(what)
            logger.warning("%s", what)

    def _add(self, key: str, value: float) -> None:
        """Count it where Baton's connector reports from."""
        if has_kv_transfer_group():
            stats = getattr(getattr(get_kv_transfer_group(), "connector_worker", None), "xfer_stats", None)
            if stats is not None and hasattr(stats, "add"):
                stats.add(key, value)


def _padded(rows: torch.Tensor, size: int, fill: float = 0) -> torch.Tensor:
    """*rows* with as many more of *fill* as make *size*."""
    if len(rows) == size:
        return rows.contiguous()
    made = rows.new_full((size, *rows.shape[1:]), fill)
    made[: len(rows)] = rows
    return made
