"""Baton's NIXL connectors: vLLM's, with what Baton adds on either side.

``BatonNixlConnector`` is read mode (the decode server pulls) and ``BatonNixlPushConnector`` write mode (the prefill
server pushes). vLLM makes one in the scheduler's process and one in each worker, and finds them by
``kv_connector_module_path``. What they add: turns that are compared before they are trusted (schedulers.py), cancelled
pushes (push.py), naps instead of spinning (waiting.py), counters (counters.py).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connector as stock

from baton.engine import hybrid_tp
from baton.engine.counters import BatonPromMetrics, BatonStats
from baton.engine.push import BatonPushScheduler
from baton.engine.push_worker import BatonPushWorker
from baton.engine.schedulers import BatonPullScheduler
from baton.engine.workarounds import HookGone
from baton.engine.workers import BatonPullWorker

_HOOKS = {
    BatonPullScheduler: (
        *("set_xfer_handshake_metadata", "get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"),
        *("build_connector_meta", "update_connector_output", "_stop_heartbeat", "_get_remote_prefill_token_count"),
        "_nixl_handshake_listener",
    ),
    BatonPushScheduler: (
        *("update_state_after_alloc", "request_finished", "update_connector_output", "build_connector_meta"),
        *("has_pending_push_work", "_stop_heartbeat", "on_new_request"),
    ),
    BatonPullWorker: (
        *(
            "_handle_heartbeat",
            "_ensure_handshake",
            "_cleanup_remote_engine",
            "_cleanup_remote_engines",
            "_nixl_handshake",
            "start_load_kv",
            "_read_blocks_for_req",
            "_read_blocks",
            "_engines_with_inflight_transfers",
        ),
        *("_pop_done_transfers", "_send_pending_recv_notifs", "get_transfer_results", "shutdown"),
    ),
    BatonPushWorker: (
        *("start_load_kv", "get_transfer_results", "_handle_push_reg_notif", "_pop_matching_registration"),
        *("_pop_matching_finished_blocks", "_do_start_push_kv", "_ensure_handshake", "_pop_done_transfers"),
        *("_get_new_notifs", "_handle_heartbeat", "_reap_expired_send_leases", "_engines_with_inflight_transfers"),
        *("_send_registration_to_p", "_do_send_reg_notif", "_xfer_blocks", "_cleanup_remote_engine"),
    ),
}


def check_hooks() -> None:
    """
    Raises:
        HookGone: the installed vLLM lacks a method that Baton's connectors override or call.
    """
    hybrid_tp.check_hooks()
    for ours, names in _HOOKS.items():
        theirs = [base for base in ours.__mro__ if base.__module__.startswith("vllm.")]
        for name in names:
            if not any(name in vars(base) for base in theirs):
                raise HookGone(f"{theirs[0].__module__}.{theirs[0].__name__}.{name} is gone: {ours.__name__} needs it")


class _Stats(stock.NixlBaseConnector):
    """How what is counted on both sides gets out."""

    def get_kv_connector_stats(self) -> Any:
        if self.connector_scheduler is not None:
            return self.connector_scheduler.take_stats()
        return super().get_kv_connector_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BatonStats:
        return BatonStats(data=data) if data is not None else BatonStats()

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> BatonPromMetrics:
        return BatonPromMetrics(*args)


class BatonNixlConnector(_Stats, stock.NixlPullConnector):
    """Read mode."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_hooks()
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        parts = (vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = BatonPullScheduler(*parts) if role is KVConnectorRole.SCHEDULER else None
        self.connector_worker = BatonPullWorker(*parts) if role is KVConnectorRole.WORKER else None


class BatonNixlPushConnector(_Stats, stock.NixlPushConnector):
    """Write mode."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_hooks()
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            raise ValueError("write mode does not do decode context parallelism: use read mode")
        stock.NixlBaseConnector.__init__(self, vllm_config, role, kv_cache_config)
        parts = (vllm_config, self.engine_id, kv_cache_config)
        self.connector_scheduler = BatonPushScheduler(*parts) if role is KVConnectorRole.SCHEDULER else None
        self.connector_worker = BatonPushWorker(*parts) if role is KVConnectorRole.WORKER else None


NixlConnector = NixlPullConnector = BatonNixlConnector
NixlPushConnector = BatonNixlPushConnector
"""vLLM finds them by these names in this module (see baton.launch.commands.CONNECTORS)."""
