"""Handing over between tensor parallel sizes when key-value heads are held by several ranks of the prefill server.

vLLM splits and gathers heads between any two sizes of which one divides the other, but refuses one case: more prefill
ranks than decode ranks, and fewer key-value heads than prefill ranks (grouped-query attention with few heads). There
several prefill ranks hold the same head; a decode rank reads it from the first of them and tells the others that it
has what it needs, so that all of them free the request's blocks.

Touches vllm 0.32, ``distributed/kv_transfer/kv_connector``: ``utils.py`` (`TransferTopology`) and
``v1/nixl/pull_worker.py`` (`NixlPullConnectorWorker`: ``transfer_topo``, ``tp_mappings``, ``_remote_agents``,
``register_kv_caches``, ``_read_blocks``). Works around the assertion in ``v1/nixl/base_worker.py``,
``_validate_remote_agent_handshake``, that no remote heads are replicated when the remote size is the larger one: the
plan made by ``tp_mapping.py`` has the right ranks for that case, but nobody tells the ranks that are left out.
Can go when: vLLM drops that assertion.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from baton.engine.workarounds import HookGone

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec, TPMapping


class HybridTopology(TransferTopology):
    """A topology for which heads of a larger prefill server are split, also when several of its ranks hold one."""

    def is_kv_replicated(self, remote_engine_id: str, remote_pp_rank: int = 0) -> bool:
        """Whether a rank finds all its heads in any one remote rank: not so when those are more than we are.

        vLLM asks this to compare block sizes; a rank of ours with several heads has blocks of several times the
        remote's size then, which is what it checks for heads that are split.
        """
        remote = self.get_engine_info(remote_engine_id, remote_pp_rank)
        return remote.remote_tp_size <= self.tp_size and super().is_kv_replicated(remote_engine_id, remote_pp_rank)

    @classmethod
    def of(cls, made: TransferTopology) -> HybridTopology:
        """The same topology as *made*, before any remote engine is known."""
        return cls(**{field.name: getattr(made, field.name) for field in dataclasses.fields(made) if field.init})


def spare_ranks(plan: TPMapping, known: set[int]) -> list[int]:
    """The remote ranks that a decode rank knows and never reads from, for it reads the same heads elsewhere.

    Args:
        plan: from whom it reads.
        known: the remote ranks that it shook hands with: only its own share of them.
    """
    return sorted(known - set(plan.all_source_ranks))


class HybridTPMixin:
    """For a `NixlPullConnectorWorker`: reads replicated heads once and tells all their holders."""

    def register_kv_caches(self: Any, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)  # type: ignore[misc]
        if type(self.transfer_topo) is TransferTopology:
            self.transfer_topo = HybridTopology.of(self.transfer_topo)

    def _read_blocks(self: Any, read_spec: ReadSpec, dst_engine_id: str, **more: Any) -> bool:
        """Post one read, and with the last one of a request the news to the ranks that are not read from."""
        posted = super()._read_blocks(read_spec=read_spec, dst_engine_id=dst_engine_id, **more)  # type: ignore[misc]
        plan = self.tp_mappings[dst_engine_id]
        # Attention over latents is the same on all ranks, and vLLM tells them by itself.
        if posted and not self.use_mla and read_spec.remote_rank == plan.all_source_ranks[-1]:
            agents = {rank: name for (_, rank), name in self._remote_agents[dst_engine_id].items()}
            news = f"{more['remote_request_id']}:{more['expected_consumers']}".encode()
            for rank in spare_ranks(plan, set(agents)):
                self._tell(agents[rank], rank, news, dst_engine_id, more["request_id"])
        return bool(posted)

    def _tell(self: Any, agent: str, rank: int, news: bytes, engine_id: str, request_id: str) -> None:
        try:
            self.nixl_wrapper.send_notif(agent, notif_msg=news)
        except Exception as error:  # NIXL has no common class; the blocks come back when their lease ends
            self._log_failure(
                failure_type="notification_failed",
                msg="Prefill rank keeps the blocks until their lease ends.",
                req_id=request_id,
                error=error,
                dst_engine_id=engine_id,
                remote_rank=rank,
                remote_agent_name=agent,
            )
            self.xfer_stats.record_failed_notification()


def check_hooks() -> None:
    """Whether vLLM still has what this file attaches to.

    Raises:
        HookGone: it has not; the message names the place.
    """
    wanted = {"read_spec", "dst_engine_id", "remote_request_id", "expected_consumers", "request_id"}
    has = set(inspect.signature(getattr(NixlPullConnectorWorker, "_read_blocks", lambda: None)).parameters)
    if not wanted <= has:
        raise HookGone(
            "vllm's NixlPullConnectorWorker._read_blocks no longer takes "
            f"{', '.join(sorted(wanted - has))}: Baton cannot hand over between tensor parallel sizes"
        )
    if not hasattr(TransferTopology, "is_kv_replicated") or not dataclasses.is_dataclass(TransferTopology):
        raise HookGone(
            "vllm's TransferTopology.is_kv_replicated is gone: Baton cannot hand over between tensor parallel sizes"
        )
