"""The scheduler's side of Baton's connectors: what read mode and write mode have in common, and read mode's own.

Runs in the engine core's process, one thread; vLLM calls each method within a step. Subclasses of vLLM 0.32's
``NixlBaseConnectorScheduler`` and ``NixlPullConnectorScheduler``
(distributed/kv_transfer/kv_connector/v1/nixl/base_scheduler.py and pull_scheduler.py).
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from baton.engine import side_channel
from baton.engine.counters import WAITS, BatonStats
from baton.engine.held import Held, digest
from baton.engine.turns import common_tokens, digests
from baton.engine.waiting import RUNG_SECONDS, Naps

logger = logging.getLogger("vllm.baton")

KEPT_SHARE = 0.5
"""Of the KV cache: what kept turns may hold, so that new requests always find room."""

MOST_EARLY = 4096
"""Names of requests that are remembered since somebody spoke of them too early."""

FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SideChannelTaken(RuntimeError):
    """Somebody else listens where peers would ask this engine for its NIXL metadata."""


class Watchful(NixlBaseConnectorScheduler):
    """Counts, naps while there is only waiting, and drops notices that nobody waits for.

    It finds a taken side channel before it hangs the start, and answers there. What is held for readers it knows in
    read mode; in write mode nobody asks.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._held = Held()
        # What notices may speak of: requests whose blocks wait for a reader, and those that wait for their own.
        self._pinned: set[str] = set()
        self._receiving: set[str] = set()
        self._read_early: set[str] = set()
        self.stats = BatonStats()
        self._naps, self._idle = Naps(), False
        self.naps_itself = True
        """Until an engine core that can be woken asks for :meth:`patience`."""
        self._loads: dict[str, tuple[float, int]] = {}

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        # vLLM binds in a thread and waits for it: were the port taken, the thread would end and the start hang.
        _check_free(self.side_channel_host, self.side_channel_port)
        super().set_xfer_handshake_metadata(metadata)

    def _nixl_handshake_listener(self, encoded_data: Any, *parts: Any) -> None:
        side_channel.listen(encoded_data, self._held, *parts)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0 and request.kv_transfer_params:
            self._receiving.add(request.request_id)
            self._loads[request.request_id] = time.perf_counter(), num_external_tokens

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._drop_stale(connector_output)
        super().update_connector_output(connector_output)
        if connector_output.finished_sending or connector_output.finished_recving:
            self._busy()
        for request_id in connector_output.finished_sending or ():
            self._held.release(request_id)
        for request_id in connector_output.finished_recving or ():
            load = self._loads.pop(request_id, None)
            if load is not None and request_id not in (connector_output.failed_recving or ()):
                since, tokens = load
                self.stats.add(WAITS, time.perf_counter() - since)
                self.stats.add("pulls")
                self.stats.add("pulled_tokens", tokens)

    def _drop_stale(self, connector_output: KVConnectorOutput) -> None:
        """Take out notices of transfers that nobody waits for: vLLM (0.32, v1/core/sched/scheduler.py,
        ``_update_from_kv_xfer_finished``) asserts that it knows the request, and would free what is in use."""
        sent, received = connector_output.finished_sending or set(), connector_output.finished_recving or set()
        unsent, unawaited = sent - self._pinned, received - self._receiving
        if unsent or unawaited:
            named = ", ".join(sorted(unsent | unawaited))
            logger.warning("notices of transfers that nobody waits for are ignored: %s", named)
            if len(self._read_early) > MOST_EARLY:
                self._read_early.clear()
            self._read_early |= unsent
            connector_output.finished_sending = sent - unsent
            connector_output.finished_recving = received - unawaited
        self._pinned -= sent
        self._receiving -= received

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._loads.pop(request.request_id, None)
        if request.request_id in self._read_early:
            # A forged ticket named it before it was done: the worker has crossed it off, and would never free it.
            self._read_early.discard(request.request_id)
            self._stop_heartbeat(request.request_id)
            self._reqs_not_processed.add(request.request_id)
            return False, None
        delayed, ticket = super().request_finished(request, block_ids)
        if delayed:
            # A worker ends no lease of what it never heard of, and of tickets that ask nothing it hears nothing.
            self._reqs_in_batch.add(request.request_id)
            self._pinned.add(request.request_id)
            self.stats.add("leases_pinned")
        if delayed and ticket is not None and self._TRANSFER_MODE == "pull":
            tokens = request.all_token_ids[: ticket["remote_num_tokens"]]
            self._held.keep(request.request_id, ticket["remote_block_ids"], tokens, salt_of(request))
        return delayed, ticket

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        claims = {
            request_id: self._claim(request)
            for request_id, (request, _, _, awaited) in self._reqs_need_recv.items()
            if awaited and self._TRANSFER_MODE == "pull"
        }
        meta = super().build_connector_meta(scheduler_output)
        meta.claims = claims
        if scheduler_output.total_num_scheduled_tokens or _has_work(meta):
            self._busy()
        else:
            self._idle = True
            if self.naps_itself:
                time.sleep(self.patience())
        return meta

    def patience(self) -> float:
        """Seconds for which nothing is to be done but to wait, unless a request or a ring comes."""
        if not self._idle:
            return 0.0
        if self._receiving and self._TRANSFER_MODE == "push" and not self.naps_itself:
            # What comes is seen by the worker's thread, which rings.
            return RUNG_SECONDS
        return self._naps.seconds(time.perf_counter())

    def _busy(self) -> None:
        self._idle = False
        self._naps.busy()

    def _claim(self, request: Request) -> tuple[int, bytes | None]:
        """How many tokens of *request*'s prompt it takes from elsewhere, and their digest."""
        ticket = request.kv_transfer_params or {}
        tokens = ticket.get("_common_tokens") or self._get_remote_prefill_token_count(request.num_prompt_tokens)
        salt = salt_of(request)
        if salt is None or request.prompt_token_ids is None:
            return tokens, None
        return tokens, digest(request.prompt_token_ids[:tokens], salt)

    def take_stats(self) -> BatonStats | None:
        """What was counted since the last call; None when nothing was."""
        return None if self.stats.is_empty() else self.stats.clone_and_reset()


def _has_work(meta: Any) -> bool:
    """Whether a worker has something new to start because of *meta*."""
    return bool(meta.reqs_to_recv or meta.push_registrations or meta.push_finished_blocks)


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SideChannelTaken(
                f"the side channel {host}:{port} cannot be listened on ({error.strerror}): move it with "
                "--side-channel-port (VLLM_NIXL_SIDE_CHANNEL_PORT)"
            ) from error


class BatonPullScheduler(Watchful, NixlPullConnectorScheduler):
    """Read mode, and turns: a decode server keeps a turn's blocks, the next turn's prefill server pulls what is common.

    A turn is kept by a decode server when its ticket does not say ``keep_blocks: false`` and kept turns hold less than
    :data:`KEPT_SHARE` of the cache. With several KV cache groups (sliding windows), prompt embeddings or multimodal
    inputs it is not: their blocks cannot be compared by tokens.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept_blocks: dict[str, int] = {}

    # prefill

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        ticket = request.kv_transfer_params
        if ticket and ticket.get("do_remote_prefill") and not self._covers(ticket, request):
            # Too few blocks for the prompt: half an answer would be wrong, so the prompt is computed here.
            logger.warning("the ticket of %s does not cover its prompt: it is computed here", request.request_id)
            ticket["do_remote_prefill"] = False
            # Without blocks to read the worker only tells the prefill server to free its own.
            self._reqs_need_recv[request.request_id] = (request, [], (), False)
            return 0, False
        if ticket and ticket.get("do_remote_decode") and ticket.get("remote_block_ids"):
            if "_common_tokens" not in ticket:
                self._keep_common(ticket, request)
            # vLLM loads once for a request; one that failed it would wait for the second load for ever.
            if not ticket["_common_tokens"] or ticket.get("_remote_blocks_processed"):
                return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def _covers(self, ticket: dict[str, Any], request: Request) -> bool:
        groups: list[list[int]] = ticket.get("remote_block_ids") or []
        if len(groups) != len(self.kv_cache_config.transfer_groups):
            return False
        # With decode context parallelism a block is spread over ranks.
        block_tokens = self.block_size * (ticket.get("dcp_size") or 1)
        needed = -(-self._get_remote_prefill_token_count(request.num_prompt_tokens) // block_tokens)
        return len(groups) > 1 or self._is_hma_required or len(groups[0]) >= needed

    def _keep_common(self, ticket: dict[str, Any], request: Request) -> None:
        """Cut a turn's ticket down to the prefix that it has in common with the prompt."""
        offered = ticket.get("remote_num_tokens") or 0
        salt, groups = salt_of(request), ticket["remote_block_ids"]
        common = 0
        if salt is not None and len(groups) == 1 and self.is_bidirectional_kv_xfer_enabled:
            common = common_tokens(ticket, request.prompt_token_ids or (), self.block_size, salt)
        ticket["_common_tokens"] = common
        if common:
            ticket["remote_num_tokens"] = common
            ticket["remote_block_ids"] = [groups[0][: -(-common // self.block_size)]]
        else:
            self.stats.add("refused_prefixes")
        if offered > common:
            self.stats.add("refused_tokens", offered - common)

    # decode

    def request_finished(self, request: Request, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        ticket = request.kv_transfer_params
        keeps = self.is_bidirectional_kv_xfer_enabled
        if not ticket or ticket.get("do_remote_decode") or ticket.get("do_remote_prefill") or not keeps:
            return super().request_finished(request, block_ids)
        salt, count = salt_of(request), sum(len(group) for group in block_ids)
        wanted = ticket.get("keep_blocks") is not False and request.status in FINISHED and salt is not None
        if wanted and len(block_ids) == 1 and self._room_for(count):
            delayed, made = super().request_finished(request, block_ids)
            if delayed and made is not None:
                self._kept_blocks[request.request_id] = count
                made |= digests(request.all_token_ids[: made["remote_num_tokens"]], self.block_size, salt or "")
            return delayed, made
        if wanted:
            self.stats.add("turns_declined")
        self._stop_heartbeat(request.request_id)
        self._loads.pop(request.request_id, None)
        self._reqs_not_processed.add(request.request_id)
        return False, None

    def _room_for(self, count: int) -> bool:
        return sum(self._kept_blocks.values()) + count <= KEPT_SHARE * self.kv_cache_config.num_blocks

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_sending or ():
            self._kept_blocks.pop(request_id, None)


def salt_of(request: Request) -> str | None:
    """What a request's KV cache depends on beside its tokens; None when that cannot be said."""
    if request.mm_features or request.prompt_embeds is not None:
        return None
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return f"{adapter}\0{request.cache_salt or ''}"
