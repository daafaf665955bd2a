"""What Baton's connector counts beside vLLM's own NIXL metrics, and how Prometheus gets it.

vLLM carries a connector's stats from workers and scheduler to the API server as plain dicts of lists
(``KVConnectorStats``, vllm 0.32, distributed/kv_transfer/kv_connector/v1/metrics.py).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics
from vllm.v1.metrics.utils import create_metric_per_engine

STEP_COUNTERS = {
    "step_prefills": ("baton_step_prefills", "Steps of prefill (static shapes)."),
    "step_prefill_tokens": ("baton_step_prefill_tokens", "Tokens in steps of prefill."),
    "step_prefill_padded_tokens": ("baton_step_prefill_padded_tokens", "The same with what they were padded by."),
    "step_uncompiled": ("baton_step_uncompiled", "Steps that had no graph and ran without one."),
    "graphs_compiled": ("baton_graphs_compiled", "Graphs compiled at the start."),
    "graphs_loaded": ("baton_graphs_loaded", "Graphs that came from the store at the start."),
    "step_decodes": ("baton_step_decodes", "Steps of decode (static shapes)."),
    "step_decode_tokens": ("baton_step_decode_tokens", "Tokens in steps of decode."),
    "step_decode_padded_tokens": ("baton_step_decode_padded_tokens", "The same with what they were padded by."),
}
COUNTERS = {
    "pulls": ("baton_kv_loads", "Requests whose KV cache came from another engine."),
    "pulled_tokens": ("baton_kv_loaded_tokens", "Prompt tokens whose KV cache came from another engine."),
    "refused_prefixes": (
        "baton_kv_refused_prefixes",
        "Kept turns that had no token in common with the next prompt, or none that anybody can vouch for.",
    ),
    "refused_tokens": ("baton_kv_refused_tokens", "Tokens of kept turns that were not those of the next prompt."),
    "leases_pinned": ("baton_kv_leases_pinned", "Finished requests whose blocks wait for a reader."),
    "leases_renewed": ("baton_kv_leases_renewed", "Leases that a waiting reader had renewed."),
    "bad_tickets": ("baton_kv_bad_tickets", "Tickets that name blocks or ranks which cannot be: nothing was read."),
    "refused_reads": (
        "baton_kv_refused_reads",
        "Reads that were not used, since the other engine did not hold those blocks for that prompt any more.",
    ),
    "turns_declined": ("baton_kv_turns_declined", "Turns that were not kept since kept ones fill their share."),
    **STEP_COUNTERS,
}
WAITS = "wait_seconds"
_KEYS = (*COUNTERS, WAITS)
_WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class BatonStats(NixlKVConnectorStats):
    """vLLM's NIXL stats and ours; lists, so that both are added up alike."""

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in _KEYS})

    def add(self, key: str, value: float = 1) -> None:
        """Count *value* more of *key*, one of :data:`COUNTERS` or :data:`WAITS`."""
        self.data[key].append(value)

    def is_empty(self) -> bool:
        return super().is_empty() and not any(self.data.get(key) for key in _KEYS)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, values in other.data.items():
            self.data.setdefault(key, []).extend(values)
        return self


class BatonPromMetrics(NixlPromMetrics):
    """Prometheus' side of :class:`BatonStats`, in the API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {
            key: create_metric_per_engine(
                self._counter_cls(name=name, documentation=what, labelnames=labelnames), per_engine
            )
            for key, (name, what) in COUNTERS.items()
        }
        waits = self._histogram_cls(
            name="baton_kv_wait_seconds",
            documentation="Time of a request in WAITING_FOR_REMOTE_KVS, in seconds.",
            buckets=_WAIT_BUCKETS,
            labelnames=labelnames,
        )
        self._waits = create_metric_per_engine(waits, per_engine)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for key, metric in self._counters.items():
            for value in transfer_stats_data.get(key, ()):
                metric[engine_idx].inc(value)
        for value in transfer_stats_data.get(WAITS, ()):
            self._waits[engine_idx].observe(value)
