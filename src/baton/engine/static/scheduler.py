"""vLLM's scheduler, shown a step's requests only: prefill of one request, or decodes.

vLLM stays in charge of blocks, chunks, preemption, grammars and transfers: each step is chosen first (steps.py), the
other requests are hidden while vLLM's ``schedule`` runs, and put back at their places. Runs in the engine core.

Touches, of vllm 0.32 (v1/core/sched/scheduler.py): ``running``, ``waiting``, ``kv_holding_waiting``,
``max_num_active_reqs`` (no waiting request is looked at once so many run), ``throttle_prefills`` and
``prefill_capacity_bound`` (prompts are left for later while a decode runs, transfers are started all the same),
``finished_recving_kv_req_ids``. Can go when: vLLM's scheduler separates the phases itself.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from baton.engine.static.buckets import StaticShapes, padded_tokens
from baton.engine.static.setup import shapes_of
from baton.engine.static.steps import Awaits, Kind, Phase, Seen, Step, choose, kind_of, phase_of
from baton.engine.static.warmup import phases
from baton.engine.workarounds import HookGone

logger = logging.getLogger("vllm.baton")

_HOOKS = (
    *("running", "waiting", "kv_holding_waiting", "max_num_active_reqs", "prefill_capacity_bound"),
    *("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "num_waiting_for_streaming_input"),
)


class StaticScheduler(Scheduler):
    """Phases never share a step; see the module."""

    running: list[Request]
    max_num_active_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_hooks(self)
        self.shapes: StaticShapes = shapes_of(self.vllm_config)
        transfer = self.vllm_config.kv_transfer_config
        self._graphs_of = phases(transfer.kv_role if transfer is not None else None, os.environ)
        self._streak = 0
        self._free_wanted: int | None = None
        """Free blocks when a prompt last found too few; None when it did not."""
        self._local: set[str] = set()
        """Requests that have a ticket, and whose prompt is computed here all the same."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        requests = [*self.running, *self.kv_holding_waiting, *self.waiting]
        step = choose(
            [Seen(request.request_id, self._kind(request)) for request in requests],
            streak=self._streak,
            limit=self.shapes.max_consecutive_prefill_steps,
            room=len(self.running) + self.num_waiting_for_streaming_input < self.max_num_active_reqs,
            fits=self._free_wanted is None or self._blocks_left() > self._free_wanted,
            decode_first=throttle_prefills,
        )
        output = self._schedule_shown(step)
        self._learn(step, output)
        self._count(output)
        return output

    def _kind(self, request: Request) -> Kind:
        """Where *request* stands, by its status and what of it is computed, never by its size alone."""
        ticket = request.kv_transfer_params or {}
        asks = bool(ticket.get("do_remote_prefill")) and request.request_id not in self._local
        return kind_of(
            running=request.status == RequestStatus.RUNNING,
            in_prompt=request.is_prefill_chunk,
            awaits=self._awaits(request),
            computed=request.num_computed_tokens,
            total=request.num_tokens,
            asks=asks and self.connector is not None,
        )

    def _awaits(self, request: Request) -> Awaits:
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            return Awaits.EVENT
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return Awaits.NOTHING if request.request_id in self.finished_recving_kv_req_ids else Awaits.EVENT
        if request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            made = request.structured_output_request and request.structured_output_request.grammar
            if made is None:
                return Awaits.EVENT
            return Awaits.ITS_END if isinstance(made, Exception) else Awaits.NOTHING
        return Awaits.NOTHING

    def _schedule_shown(self, step: Step) -> SchedulerOutput:
        """vLLM's own schedule over the requests that *step* shows; the others are back at their places afterwards."""
        running, waiting, holding = list(self.running), list(self.waiting), list(self.kv_holding_waiting)
        most = self.max_num_active_reqs
        self.running = _only(running, step.shown)
        _refill(self.waiting, _only(waiting, step.shown))
        _refill(self.kv_holding_waiting, _only(holding, step.shown))
        allowed = most - (len(running) - len(self.running))
        if step.admit is not None:
            allowed = min(allowed, len(self.running) + self.num_waiting_for_streaming_input + step.admit)
        self.max_num_active_reqs = allowed
        self.prefill_capacity_bound = False
        try:
            return super().schedule(step.defer_prompts)
        finally:
            self.max_num_active_reqs = most
            self.running = _merged(running, self.running, step.shown, new_first=False)
            _refill(self.waiting, _merged(waiting, self.waiting, step.shown, new_first=True))
            _refill(self.kv_holding_waiting, _merged(holding, self.kv_holding_waiting, step.shown, new_first=True))

    def _learn(self, step: Step, output: SchedulerOutput) -> None:
        """What the outcome of *step* means for the next ones."""
        nothing = not output.num_scheduled_tokens
        self._streak = self._streak + 1 if step.starves else 0
        if step.phase is Phase.PREFILL:
            self._free_wanted = self._blocks_left() if nothing and step.starves else None
        elif step.defer_prompts and len(self.running) < self.max_num_active_reqs and self.waiting:
            # A prompt with a ticket that vLLM looked at and left where it was: there is nothing to load for it.
            head = next((each for each in self.waiting if each.request_id in step.shown), None)
            if head is not None and head.status == RequestStatus.WAITING:
                self._local.add(head.request_id)
        self._local.intersection_update(self.requests)

    def _count(self, output: SchedulerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        prefills = [
            name
            for name, count in scheduled.items()
            if self.requests[name].is_prefill_chunk or count - len(drafts.get(name, ())) > 1
        ]
        phase = phase_of(scheduled, prefills)
        if phase is Phase.IDLE:
            return
        true = output.total_num_scheduled_tokens
        padded = padded_tokens(
            self.shapes,
            num_tokens=true,
            num_reqs=len(scheduled),
            longest=max(scheduled.values()),
            tokens_a_row=1 + self.num_spec_tokens,
            decodes=Phase.DECODE in self._graphs_of,
        )
        stats = getattr(getattr(self.connector, "connector_scheduler", None), "stats", None)
        if stats is not None:
            stats.add(f"step_{phase}s")
            stats.add(f"step_{phase}_tokens", true)
            stats.add(f"step_{phase}_padded_tokens", padded)

    def _blocks_left(self) -> int:
        return int(self.kv_cache_manager.block_pool.get_num_free_blocks())


class StaticAsyncScheduler(StaticScheduler, AsyncScheduler):
    """The same for engines that schedule a step ahead."""


def check_hooks(scheduler: Scheduler) -> None:
    """
    Raises:
        HookGone: the installed vLLM's scheduler lacks something that hiding requests rests on.
    """
    gone = [name for name in _HOOKS if not hasattr(scheduler, name)]
    if "throttle_prefills" not in inspect.signature(Scheduler.schedule).parameters:
        gone.append("schedule(throttle_prefills)")
    if not hasattr(scheduler.kv_cache_manager.block_pool, "get_num_free_blocks"):
        gone.append("kv_cache_manager.block_pool.get_num_free_blocks")
    if gone:
        raise HookGone(f"vllm.v1.core.sched.scheduler.Scheduler.{gone[0]} is gone: static shapes need it")


def _only(requests: Iterable[Request], shown: frozenset[str]) -> list[Request]:
    return [request for request in requests if request.request_id in shown]


def _merged(
    before: list[Request], after: Iterable[Request], shown: frozenset[str], *, new_first: bool
) -> list[Request]:
    """*after* and what of *before* was hidden, in the order of *before*; those that came in first or last."""
    now = list(after)
    known, left = {each.request_id for each in before}, {each.request_id for each in now}
    new = [each for each in now if each.request_id not in known]
    old = [each for each in before if each.request_id in left or each.request_id not in shown]
    return [*new, *old] if new_first else [*old, *new]


def _refill(queue: Any, requests: list[Request]) -> None:
    queue.clear()
    queue.extend(requests)
