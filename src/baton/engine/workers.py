"""The workers' side of Baton's connectors, but for pushing: counts what vLLM's own workers don't, and trusts no ticket.

vLLM's reader (0.32, nixl/pull_worker.py) takes a ticket at its word: a block number out of range, a group too many or a
rank that isn't there ends the engine or reads somebody else's cache, and what was read with an old ticket is served.
Here a read that cannot be is that request's failure, a handshake that failed leaves nothing behind (base_worker.py,
``add_remote_agent`` registers before it validates), and no read counts before the other engine has said that it still
holds what was read (:mod:`baton.engine.held`). The reader's notice, with which the other engine frees the blocks, goes
out after that and not with the read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker

from baton.engine.counters import BatonStats
from baton.engine.held import Claim
from baton.engine.hybrid_tp import HybridTPMixin
from baton.engine.lost_peers import Watched
from baton.engine.side_channel import Asker

logger = logging.getLogger("vllm.baton")

BY_ENGINE = (
    *("dst_xfer_side_handles", "kv_caches_base_addr", "dst_num_blocks", "dst_region_num_blocks"),
    *("dst_region_group_ids", "dst_uses_region_group_mapping", "dst_region_mem_types", "tp_mappings"),
)
"""What vLLM's worker remembers of a remote engine beside its agents (nixl/base_worker.py, ``add_remote_agent``)."""


class Counting(NixlBaseConnectorWorker):
    """Counts renewed leases (vllm 0.32, nixl/base_worker.py ``_handle_heartbeat``), forgets failed handshakes, and
    meets lost peers anew (:mod:`baton.engine.lost_peers`).

    Handshakes are one an engine id, and whoever comes meanwhile shares what becomes of it: also with a ticket that says
    another port. Here such a one tries its own when the other has failed.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.xfer_stats = BatonStats()
        self._peers = Watched(self.nixl_wrapper)
        self.nixl_wrapper: Any = self._peers
        self._shaking: dict[str, tuple[Any, ...]] = {}
        self._shaking_lock = threading.RLock()
        self._lost_sizes: dict[str, Any] = {}
        """Of engines that are to be met anew: what is awaited from them is still looked up by these."""

    def _is_lost(self, engine_id: str) -> bool:
        """Whether nothing reaches that engine with what is known of it."""
        agents = self._remote_agents.get(engine_id) or {}
        return any(name in self._peers.lost for name in agents.values())

    def _cleanup_remote_engines(self) -> None:
        """Read mode's, in its main thread: what is lost is forgotten once its reads have ended."""
        if self._peers.lost:
            self._failed_remote_engines.update(filter(self._is_lost, list(self._remote_agents)))
        super()._cleanup_remote_engines()

    def _forget_lost(self, engine_id: str) -> None:
        """The same in write mode, where vLLM does not, before something is sent; in any thread."""
        if self._TRANSFER_MODE == "pull" or not self._peers.lost:
            return
        with self._shaking_lock:
            if self._is_lost(engine_id) and not any(map(self._peers.busy, self._remote_agents[engine_id].values())):
                logger.warning("the connection to engine %s is lost: it is met anew", engine_id)
                assert self.transfer_topo is not None
                sizes = self._lost_sizes[engine_id] = self.transfer_topo.get_engine_info(engine_id)
                self._cleanup_remote_engine(engine_id, log_eviction=False)
                self.transfer_topo.register_remote_engine(engine_id, sizes)

    def _awaited_engines(self) -> set[str]:
        """Engines that something is awaited from; in any thread."""
        return {meta.remote.engine_id for meta in list(self._recving_metadata.values()) if meta.remote is not None}

    def _ensure_handshake(self, engine_id: str, *where: Any, **more: Any) -> Future[Any] | None:
        self._forget_lost(engine_id)
        wanted = (*where, *sorted(more.items()))
        with self._shaking_lock:
            with self._handshake_lock:
                pending: Future[Any] | None = self._handshake_futures.get(engine_id)
            if pending is None or self._shaking.get(engine_id) == wanted:
                self._shaking[engine_id] = wanted
                begun: Future[Any] | None = super()._ensure_handshake(engine_id, *where, **more)
                return begun
        own: Future[Any] = Future()

        def settle(done: Future[Any]) -> None:
            error = done.exception()
            if error is None:
                own.set_result(done.result())
            else:
                own.set_exception(error)

        def others_is_over(done: Future[Any]) -> None:
            again = self._ensure_handshake(engine_id, *where, **more) if done.exception() is not None else done
            if again is None:
                own.set_result(None)
            else:
                again.add_done_callback(settle)

        pending.add_done_callback(others_is_over)
        return own

    def _send_heartbeats(self, metadata: Any) -> None:
        # In write mode another thread may forget a lost peer between vLLM's looks at it.
        with self._shaking_lock:
            super()._send_heartbeats(metadata)

    def _handle_heartbeat(self, payload: str) -> None:
        renewed = sum(request_id in self._reqs_to_send for request_id in payload.split(","))
        if renewed:
            self.xfer_stats.add("leases_renewed", renewed)
        super()._handle_heartbeat(payload)

    def _nixl_handshake(self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *more: Any) -> Any:
        if expected_engine_id == self.engine_id:
            raise ValueError("the ticket names this engine itself")
        try:
            shaken = super()._nixl_handshake(host, port, remote_tp_size, expected_engine_id, *more)
            self._lost_sizes.pop(expected_engine_id, None)
            return shaken
        except BaseException:
            if expected_engine_id not in self._remote_agents:
                self._forget(expected_engine_id)
            raise

    def _forget(self, engine_id: str) -> None:
        """Undo what a handshake that failed has registered: the next one may say other sizes."""
        for handle in (self.dst_xfer_side_handles.get(engine_id) or {}).values():
            self.nixl_wrapper.release_dlist_handle(handle)
        for name in BY_ENGINE:
            getattr(self, name).pop(engine_id, None)
        if self.transfer_topo is not None and engine_id not in self._lost_sizes:
            self.transfer_topo.unregister_remote_engine(engine_id)


class LateNotices:
    """A NIXL agent whose reads carry no notice: it is sent when what was read is known to be good."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, operation: str, *args: Any, **more: Any) -> Any:
        if operation == "READ":
            more.pop("notif_msg", None)
        return self._agent.make_prepped_xfer(operation, *args, **more)


class BatonPullWorker(Counting, HybridTPMixin, NixlPullConnectorWorker):
    """Read mode, for any two tensor parallel sizes of which one divides the other. One thread, but for the asking."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.nixl_wrapper = LateNotices(self.nixl_wrapper)
        self._asker = Asker()
        self._asking = ThreadPoolExecutor(2, thread_name_prefix="baton-held")
        # What is to be asked about each read, and the answers that are awaited; both by our own request.
        self._claims: dict[str, tuple[str, int, Claim]] = {}
        self._answers: dict[str, Future[str | None]] = {}

    def start_load_kv(self, metadata: Any) -> None:
        claims: Mapping[str, tuple[int, bytes | None]] = getattr(metadata, "claims", {})
        for request_id, (tokens, digest) in claims.items():
            remote = metadata.reqs_to_recv[request_id].remote
            blocks = [list(group) for group in remote.block_ids]
            self._claims[request_id] = remote.host, remote.port, Claim(remote.request_id, blocks, tokens, digest)
        super().start_load_kv(metadata)

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        wrong = self._impossible(meta)
        if wrong is None:
            try:
                super()._read_blocks_for_req(req_id, meta)
                return
            except Exception as error:  # whatever a ticket can provoke is that request's failure alone
                logger.warning("the read for %s failed", req_id, exc_info=True)
                wrong = repr(error)
        logger.warning("the ticket of %s cannot be read with: %s", req_id, wrong)
        self.xfer_stats.add("bad_tickets")
        self._claims.pop(req_id, None)
        if req_id in self._recving_metadata:
            # Reported once what has been posted of it is over.
            self._recv_failures.add(req_id)

    def _impossible(self, meta: Any) -> str | None:
        """Why *meta*'s remote blocks cannot be; None also while the other engine is unknown."""
        engine_id, groups = meta.remote.engine_id, meta.remote.block_ids
        if engine_id not in self._remote_agents or not any(meta.local_block_ids):
            return None
        wanted = len(meta.local_block_ids)
        if len(groups) != wanted:
            return f"it has blocks of {len(groups)} KV cache groups, not {wanted}"
        assert self.transfer_topo is not None
        ratio = self.transfer_topo.get_engine_info(engine_id).remote_physical_blocks_per_logical
        count = self.dst_num_blocks[engine_id] // ratio
        for group in groups:
            beyond = next((block for block in group if not 0 <= block < count), None)
            if beyond is not None:
                return f"block {beyond} of {engine_id}, which has {count}"
            # The null block stands for what a sliding window has left behind.
            named = [block for block in group if block]
            if len(set(named)) != len(named):
                return "a block stands in it twice"
        return None

    def _read_blocks(self, read_spec: Any, dst_engine_id: str, **more: Any) -> bool:
        posted = super()._read_blocks(read_spec=read_spec, dst_engine_id=dst_engine_id, **more)
        if posted and not self._mixed_mem_types and any(len(group) for group in read_spec.local_block_ids):
            agent = self._remote_agents[dst_engine_id][(0, read_spec.remote_rank)]
            notice = f"{more['remote_request_id']}:{more['expected_consumers']}".encode()
            self._pending_recv_notifs.setdefault(more["request_id"], []).append((agent, notice))
        return posted

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        """Reads that are over; each is held back until the other engine has said that they count."""
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is not self._recving_transfers:
            return done, failed
        for request_id in list(done):
            claim = self._claims.pop(request_id, None)
            if claim is not None and request_id not in failed and request_id not in self._recv_failures:
                self._answers[request_id] = self._asking.submit(self._asker.problem, *claim)
                done.discard(request_id)
        for request_id, answer in list(self._answers.items()):
            if not answer.done():
                continue
            del self._answers[request_id]
            problem = answer.result() if answer.exception() is None else repr(answer.exception())
            if problem is None:
                done.add(request_id)
            else:
                logger.warning("what was read for %s is not used: %s", request_id, problem)
                self.xfer_stats.add("refused_reads")
                failed.add(request_id)
        return done, failed

    def _engines_with_inflight_transfers(self) -> set[str]:
        """A read is in flight until the other engine has said that it counts."""
        asked = {meta.remote.engine_id for name, meta in self._recving_metadata.items() if name in self._answers}
        return super()._engines_with_inflight_transfers() | asked

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        for request_id in results.failed_recving:
            self._claims.pop(request_id, None)
        return results

    def shutdown(self) -> None:
        if hasattr(self, "_asking"):
            self._asking.shutdown(wait=False)
        super().shutdown()
