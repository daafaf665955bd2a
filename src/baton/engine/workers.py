"""The workers' side of Baton's connectors, but for pushing: counts what vLLM's own workers don't."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from baton.engine.counters import BatonStats
from baton.engine.hybrid_tp import HybridTPMixin


class Counting(NixlBaseConnectorWorker):
    """Counts renewed leases (vllm 0.32, nixl/base_worker.py ``_handle_heartbeat``)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.xfer_stats = BatonStats()

    def _handle_heartbeat(self, payload: str) -> None:
        renewed = sum(request_id in self._reqs_to_send for request_id in payload.split(","))
        if renewed:
            self.xfer_stats.add("leases_renewed", renewed)
        super()._handle_heartbeat(payload)


class BatonPullWorker(Counting, HybridTPMixin, NixlPullConnectorWorker):
    """Read mode, for any two tensor parallel sizes of which one divides the other."""
