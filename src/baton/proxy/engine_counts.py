"""What engines count of their transfers, read off their ``/metrics``. Pure.

Stock vLLM's names (0.32, kv_connector/v1/nixl/stats.py) and those that Baton's plugin adds.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.counters import samples

_NAMES = {
    b"vllm:nixl_bytes_transferred_sum": "moved_bytes",
    b"vllm:nixl_bytes_transferred_count": "transfers",
    b"vllm:nixl_xfer_time_seconds_sum": "seconds",
    b"vllm:nixl_num_failed_transfers_total": "failures",
    b"vllm:nixl_num_kv_expired_reqs_total": "expired",
    b"baton_kv_loads_total": "loads",
    b"baton_kv_refused_reads_total": "refused",
    b"baton_kv_bad_tickets_total": "refused",
}


@dataclass(slots=True)
class EngineCounts:
    """Since the engine's start, over all its ranks; an engine counts what it moves itself.

    Attributes:
        moved_bytes, seconds, transfers: of NIXL transfers that were done; one is a rank's part of a request.
        loads: requests whose KV cache came from another engine (Baton's plugin).
        failures: transfers and handshakes that failed.
        expired: requests whose blocks nobody fetched before their lease ended.
        refused: tickets and reads that were not used (Baton's plugin).
    """

    moved_bytes: float = 0.0
    seconds: float = 0.0
    transfers: float = 0.0
    loads: float = 0.0
    failures: float = 0.0
    expired: float = 0.0
    refused: float = 0.0

    @classmethod
    def parse(cls, text: bytes) -> EngineCounts | None:
        """The counts in *text*; None when nothing in it is of a transfer: nobody can know then."""
        made, known = cls(), False
        for name, value in samples(text, _NAMES):
            field = _NAMES[name]
            setattr(made, field, getattr(made, field) + value)
            known = True
        return made if known else None

    def moved_since(self, before: EngineCounts) -> bool:
        """Whether a KV cache was moved between the two."""
        return self.moved_bytes > before.moved_bytes or self.loads > before.loads
