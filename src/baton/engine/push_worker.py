"""The workers' side of write mode; what the two sides owe each other stands in :mod:`baton.engine.push`."""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import Future
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id
from vllm.distributed.parallel_state import get_pp_group

from baton.engine.bounds import PushBounds
from baton.engine.push_notices import Done, No, Said, Still
from baton.engine.push_threads import Polling, Pulse, Ringing
from baton.engine.waiting import Ringer
from baton.engine.workers import Counting

logger = logging.getLogger("vllm.baton")

REMEMBER_SECONDS = 600.0
"""How long a prefill server remembers what became of a request."""

FORGET_SECONDS = 10.0

RENEWALS = 4
"""How often a registration is renewed in the time for which it is trusted."""


class BatonPushWorker(Counting, NixlPushConnectorWorker):
    """Sends and obeys cancellations; see the module's text.

    What sends and matches runs in vLLM's writer thread, the rest in the worker's main thread. What both touch of pushes
    is guarded by vLLM's ``_sending_transfers_lock``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._bounds = PushBounds.read(args[0].kv_transfer_config.get_from_extra_config)
        self._ringer = Ringer(self.engine_id)
        self._push_writer_wake = Polling(self._recving_metadata)
        self._pending_completion_notifs: Ringing = Ringing(self._ringer)
        self._push_writer_stop = self._pulse = Pulse(self._bounds.stall_seconds)
        # decode, the main thread's: registrations under way, and those cancelled and unanswered, by request, with the
        # time when each is given up; those that fail when they are over; and which ranks have spoken
        self._unanswered: dict[str, float] = {}
        self._cancellations: dict[str, dict[str, Any]] = {}
        self._awaited: dict[str, tuple[float, dict[str, Any]]] = {}
        self._given_up: set[str] = set()
        self._spoken: dict[str, set[str]] = {}
        self._renew_at = 0.0
        self._looked_at = time.monotonic()
        # decode: registrations that have gone out, by the writer; and those that a prefill server says it has dropped,
        # from the writer to the main thread
        self._registered: set[str] = set()
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        extra = self.vllm_config.kv_transfer_config.get_from_extra_config
        self._patience = float(extra("push_registration_timeout", extra("decoder_kv_blocks_ttl", 480)))
        # prefill, the writer's: when what was cancelled, handshakes that pushes wait for, and the round of a stall
        self._cancelled_at: dict[str, float] = {}
        self._meeting: dict[str, dict[str, Any]] = {}
        self._stalled_round = -1
        self._forget_at = 0.0
        self._posted: list[Any] = []
        # prefill, both threads': registrations whose push is under way, by our request; which pushes were completed and
        # which failed, by theirs; and what is over, by the base of their ids
        self._writes: dict[str, dict[str, Any]] = {}
        self._pushed: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._over: dict[str, float] = {}
        self._prompts: dict[str, tuple[int, bytes | None]] = {}
        # prefill, the writer's: the shortest time that a registration took from each sender, by two clocks
        self._delays: dict[tuple[str, str], float] = {}
        # both: this rank's name in what it says
        self._who = f"{get_pp_group().rank_in_group}.{self.tp_rank}"

    # decode

    def start_load_kv(self, metadata: Any) -> None:
        self._prompts.update(getattr(metadata, "push_prompts", {}))
        super().start_load_kv(metadata)
        until = time.monotonic() + self._patience
        self._awaited.update({name: (until, said) for name, said in metadata.push_registrations.items()})
        cancelled = getattr(metadata, "push_cancellations", None) or {}
        for request_id, cancellation in cancelled.items():
            if cancellation["registered"]:
                self._call_off(request_id, cancellation, time.monotonic())
                continue
            self._send(request_id, {**cancellation, "decode_tp_rank": self.tp_rank})
            if request_id in self._recving_metadata:
                self._recving_transfers.setdefault(request_id, [])

    def get_transfer_results(self) -> Any:
        # What has come is read before anybody is given up for what has not.
        results = super().get_transfer_results()
        now = time.monotonic()
        self._leave_out(now)
        self._lose_patience(now)
        self._free_unanswered(now)
        self._register_again()
        self._renew(now)
        with self._sending_transfers_lock:
            for request_id in results.finished_sending:
                self._prompts.pop(request_id, None)
                self._writes.pop(request_id, None)
                self._over[get_base_request_id(request_id)] = now
        for request_id in results.finished_recving:
            self._given_up.discard(request_id)
            self._spoken.pop(request_id, None)
            self._registered.discard(request_id)
            self.consumer_notification_counts_by_req.pop(request_id, None)
        return results

    def _leave_out(self, now: float) -> None:
        """A time in which this process did not look is none in which others did not answer."""
        gap, self._looked_at = now - self._looked_at, now
        if gap > self._bounds.stall_seconds / RENEWALS:
            self._unanswered = {name: until + gap for name, until in self._unanswered.items()}
            self._awaited = {name: (until + gap, said) for name, (until, said) in self._awaited.items()}

    def _free_unanswered(self, now: float) -> None:
        for request_id, until in list(self._unanswered.items()):
            is_over = request_id not in self._recving_metadata
            if not is_over and now <= until:
                continue
            if not is_over:
                logger.warning("nobody answers the cancellation of %s: its blocks are freed", request_id)
                self._failed_recv_reqs.put(request_id)
            del self._unanswered[request_id], self._cancellations[request_id]

    def _send(self, request_id: str, registration: dict[str, Any]) -> None:
        self._reg_send_inbox.put((request_id, registration))
        self._push_writer_wake.set()

    def _call_off(self, request_id: str, said: dict[str, Any], now: float) -> None:
        """Tell P that nothing is to be pushed for a registration, until it answers; not when it is over already."""
        if request_id not in self._recving_metadata:
            return
        # Without blocks nobody can take it for a registration.
        address = {name: value for name, value in said.items() if name != "local_block_ids"}
        cancellation = {**address, "cancelled": True, "registered": True, "decode_tp_rank": self.tp_rank}
        self._awaited.pop(request_id, None)
        self._unanswered[request_id] = now + self._bounds.answer_seconds
        self._cancellations[request_id] = cancellation
        self._send(request_id, cancellation)

    def _renew(self, now: float) -> None:
        """Say again what P must not forget: what is awaited, and what is called off."""
        if now < self._renew_at:
            return
        self._renew_at = now + self._bounds.stall_seconds / RENEWALS
        for request_id, (_, said) in self._awaited.items():
            # One that has not gone out yet fails when P cannot be met: it must not go out after that.
            if request_id in self._registered:
                self._send(request_id, {**said, "again": True})
        for request_id in self._unanswered:
            self._send(request_id, self._cancellations[request_id])

    def _register_again(self) -> None:
        """What a prefill server has dropped and is still wanted."""
        while not self._lost.empty():
            request_id = self._lost.get()
            awaited = self._awaited.get(request_id)
            if request_id in self._recving_metadata and awaited is not None:
                logger.warning("the registration of %s was dropped: it is sent again", request_id)
                self._send(request_id, {**awaited[1], "again": True})

    def _lose_patience(self, now: float) -> None:
        """Give up what nobody has pushed for so long: P is told, and the request fails with its answer or without."""
        for request_id, (until, said) in list(self._awaited.items()):
            if request_id not in self._recving_metadata:
                del self._awaited[request_id]
            elif now > until:
                logger.warning("nobody has pushed for %s in %g s: it is given up", request_id, self._patience)
                self._given_up.add(request_id)
                self._call_off(request_id, said, now)

    def _send_registration_to_p(self, req_id: str, reg_data: dict[str, Any]) -> None:
        """Send a registration. Only one that never went out fails its request, and frees its blocks, when it cannot."""
        if not reg_data.get("cancelled") and req_id not in self._recving_metadata:
            return  # it has waited for a handshake for longer than its request
        if not (reg_data.get("cancelled") or reg_data.get("again")):
            super()._send_registration_to_p(req_id, reg_data)
            return
        where = (reg_data[f"remote_{name}"] for name in ("engine_id", "host", "port", "tp_size"))
        ranks = reg_data.get("remote_pp_size", 1)
        waiting = self._ensure_handshake(*where, pp_size=ranks, notif_agents_only=True)
        if waiting is None:
            self._do_send_reg_notif(req_id, reg_data)
            return

        def shaken(done: Future[Any]) -> None:
            # Otherwise the next renewal tries again.
            if done.exception() is None:
                self._send(req_id, reg_data)

        waiting.add_done_callback(shaken)

    def _do_send_reg_notif(self, req_id: str, reg_data: dict[str, Any]) -> None:
        reg_data = {**reg_data, "sender": self._who, "sent_at": time.monotonic()}
        if not (reg_data.get("cancelled") or reg_data.get("again")):
            self._registered.add(req_id)
            super()._do_send_reg_notif(req_id, reg_data)
            return
        with self._handshake_lock:
            agents = dict(self._remote_agents.get(reg_data["remote_engine_id"]) or {})
        notice = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(reg_data)
        for rank, agent in agents.items():
            try:
                self.nixl_wrapper.send_notif(agent, notif_msg=notice)
            except Exception as error:  # NIXL raises what it likes
                self._log_failure(failure_type="push_reg_notif_failed", req_id=req_id, error=error, remote_rank=rank)

    def _get_new_notifs(self) -> set[str]:
        while not self._pending_completion_notifs.said.empty():
            self._hear(self._pending_completion_notifs.said.get())
        made: set[str] = super()._get_new_notifs()
        return made

    def _hear(self, said: Said) -> None:
        """What a rank of a prefill server says beside vLLM's own notices."""
        request_id = said.request_id
        meta = self._recving_metadata.get(request_id)
        if meta is None:
            return
        if isinstance(said, Still):
            if request_id in self._unanswered:
                self._unanswered[request_id] = time.monotonic() + self._patience
            return
        ranks = self._spoken.setdefault(request_id, set())
        if said.rank in ranks:
            return
        ranks.add(said.rank)
        if isinstance(said, No):
            if request_id not in self._unanswered:
                logger.warning("nothing is pushed for %s: the other engine has not what it asks for", request_id)
                self.xfer_stats.add("refused_reads")
                self._given_up.add(request_id)
            # Without a ring: this is the step that was rung for.
            queue.Queue.put(self._pending_completion_notifs, said.as_completion())
        if len(ranks) >= meta.pp_size * max(1, said.ranks // self.world_size):
            # All have spoken by name: what vLLM has counted, which knows no names, is not waited for.
            self._recving_transfers.setdefault(request_id, [])

    def _engines_with_inflight_transfers(self) -> set[str]:
        """A push is in flight from its registration on."""
        return self._awaited_engines()

    # prefill

    def _handle_heartbeat(self, payload: str) -> None:
        ours: dict[str, list[str]] = {}
        for request_id in self._reqs_to_send:
            ours.setdefault(get_base_request_id(request_id), []).append(request_id)
        named = [name for each in payload.split(",") for name in ours.get(get_base_request_id(each), [each])]
        super()._handle_heartbeat(",".join(named))

    def _reap_expired_send_leases(self, done_sending: set[str]) -> None:
        """No lease ends while its blocks are pushed."""
        with self._sending_transfers_lock:
            until = time.perf_counter() + self._lease_extension
            for request_id in self._writes:
                if request_id in self._reqs_to_send:
                    self._reqs_to_send[request_id] = max(self._reqs_to_send[request_id], until)
            super()._reap_expired_send_leases(done_sending)

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        self._notice_stall()
        try:
            registration = _registration(notif[len(PUSH_REG_NOTIF_PREFIX) :])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError):
            logger.warning("a registration that cannot be read was dropped")
            return
        request_id: str = registration["request_id"]
        base = get_base_request_id(request_id)
        if registration.get("lost"):
            self._lost.put(request_id)
            self._ringer.ring()
        elif registration.get("cancelled"):
            self._cancel(request_id, registration)
        elif (became := self._what_became_of(request_id)) is not None:
            if not isinstance(became, Still):
                self._tell(registration, became.encode())
        elif self._was_long_on_its_way(registration):
            self._answer_lost(registration)
        elif base in self._cancelled_at or base in self._over:
            logger.warning("%s comes too late: its blocks were freed, or will be", request_id)
            self._refuse(registration)
        elif self._pulse.round == self._stalled_round:
            # It may have lain here while this process stood still.
            self._answer_lost(registration)
        elif request_id in self._meeting:
            self._meeting[request_id]["received_at"] = time.monotonic()
        else:
            registration["received_at"] = time.monotonic()
            super()._handle_push_reg_notif(PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(registration))

    def _what_became_of(self, request_id: str) -> Said | None:
        """What there is to say of a push for the decode server's *request_id*; None when there has been none."""
        with self._sending_transfers_lock:
            if request_id in self._pushed:
                return Done(request_id, self.world_size, self._who)
            if request_id in self._failed:
                return self._no(request_id)
            return Still(request_id) if self._is_written(request_id) else None

    def _is_written(self, request_id: str) -> bool:
        """Whether a push for the decode server's *request_id* is under way; with the lock."""
        return any(each["request_id"] == request_id for each in self._writes.values())

    def _was_long_on_its_way(self, registration: dict[str, Any]) -> bool:
        """Whether a registration took so much longer than others of its sender that its blocks may be somebody else's.

        A network that was cut gives out what it held when it is back. By two clocks, of which only differences count.
        """
        sent_at = registration.get("sent_at")
        if not isinstance(sent_at, float):
            return False
        sender = registration["decode_engine_id"], str(registration.get("sender"))
        took = time.monotonic() - sent_at
        shortest = self._delays[sender] = min(took, self._delays.get(sender, took))
        return took - shortest > self._bounds.stall_seconds

    def _cancel(self, request_id: str, cancellation: dict[str, Any]) -> None:
        now = time.monotonic()
        self._forget_old(now)
        became = self._what_became_of(request_id)
        if became is not None and not isinstance(became, No):
            # Of one that is done the completion may have been lost.
            self._tell(cancellation, became.encode(), cancellation.get("decode_tp_rank"))
            return
        self._cancelled_at[get_base_request_id(request_id)] = now
        self._pending_d_registrations.pop(request_id, None)
        finished = self._pop_matching_finished_blocks(request_id)
        if finished is not None:
            self._free(finished[0])
        if cancellation["registered"]:
            self._refuse(cancellation)

    def _forget_old(self, now: float) -> None:
        """What is remembered only for those who come late; looked through seldom, since it may be much."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_SECONDS
        for memory in (self._cancelled_at, self._pushed, self._failed, self._over):
            for name, since in list(memory.items()):
                if now - since > REMEMBER_SECONDS:
                    memory.pop(name, None)
        for name, registration in list(self._pending_d_registrations.items()):
            if self._is_old(registration):
                del self._pending_d_registrations[name]

    def _is_old(self, registration: dict[str, Any]) -> bool:
        """Whether nobody has renewed it for so long that its blocks may be somebody else's; stock engines never do."""
        if "prompt" not in registration:
            return False
        since = registration.get("received_at", 0.0)
        return bool(time.monotonic() - since > self._bounds.stall_seconds)

    def _pop_matching_registration(self, request_id: str) -> dict[str, Any] | None:
        self._notice_stall()
        self._forget_old(time.monotonic())
        if get_base_request_id(request_id) in self._cancelled_at:
            return {"request_id": request_id, "cancelled": True}
        found: dict[str, Any] | None = super()._pop_matching_registration(request_id)
        return found

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        """Push; or do what a registration in its place asks for: tell somebody, or free what nobody wants."""
        if "notice" in registration_data:
            self._tell(registration_data, registration_data["notice"], registration_data["only_rank"])
            return
        theirs = registration_data["request_id"]
        self._meeting.pop(theirs, None)
        if registration_data.get("cancelled") or get_base_request_id(theirs) in self._cancelled_at:
            self._free(request_id)
            return
        wanted, ours = registration_data.get("prompt"), self._prompts.get(request_id)
        if wanted and ours and None not in (wanted[1], ours[1]) and tuple(wanted) != ours:
            logger.warning("%s is not pushed to %s: another prompt", request_id, theirs)
            # Whoever is meant may still come.
            self._put_back(request_id, local_block_ids)
            self._refuse(registration_data)
        elif registration_data.get("unmet") or self._is_old(registration_data):
            # Renewed, it is tried again.
            self._put_back(request_id, local_block_ids)
        elif self._meets(request_id, local_block_ids, registration_data):
            self._push(request_id, local_block_ids, registration_data)

    def _put_back(self, request_id: str, local_block_ids: Any) -> None:
        """Let finished blocks wait for another registration, as long as they are held."""
        if request_id in self._reqs_to_process:
            self._push_finished_blocks[request_id] = local_block_ids

    def _meets(self, request_id: str, local_block_ids: Any, registration: dict[str, Any]) -> bool:
        """Whether the decode server is known; otherwise the push is tried again once it is."""
        waiting = self._ensure_handshake(*_decode_server(registration))
        if waiting is None:
            return True
        self._meeting[registration["request_id"]] = registration

        def shaken(done: Future[Any]) -> None:
            if done.exception() is not None:
                registration["unmet"] = True
            self._deferred_push_inbox.put((request_id, local_block_ids, registration))
            self._push_writer_wake.set()

        waiting.add_done_callback(shaken)
        return False

    def _push(self, request_id: str, local_block_ids: Any, registration: dict[str, Any]) -> None:
        with self._sending_transfers_lock:
            held = request_id in self._reqs_to_process
            if held:
                self._writes[request_id] = registration
        if not held:
            logger.warning("%s comes too late: the blocks of %s were freed", registration["request_id"], request_id)
            self._refuse(registration)
            return
        self._posted.clear()
        try:
            super()._do_start_push_kv(request_id, local_block_ids, registration)
        except Exception:
            logger.warning("the push for %s failed", registration["request_id"], exc_info=True)
            with self._sending_transfers_lock:
                self._send_failures.add(request_id)
                if self._posted:
                    # What was posted before it failed is waited for.
                    self._sending_transfers[request_id].extend(self._posted)
        with self._sending_transfers_lock:
            nothing = request_id in self._writes and request_id not in self._sending_transfers
            if nothing:
                del self._writes[request_id]
                self._failed[registration["request_id"]] = time.monotonic()
        if nothing:
            self._say_it_failed(registration)

    def _xfer_blocks(self, *args: Any, **more: Any) -> Any:
        handle = super()._xfer_blocks(*args, **more)
        if handle is not None:
            self._posted.append(handle)
        return handle

    def _say_it_failed(self, registration: dict[str, Any]) -> None:
        """Have the writer tell the decode server that a write failed: it would wait, and hold its blocks, for minutes.

        Our own blocks stay until their lease ends.
        """
        logger.warning("what was to be written for %s was not", registration["request_id"])
        self._deferred_push_inbox.put(
            ("", (), self._noticing(registration, self._no(registration["request_id"]).encode(), None))
        )
        self._push_writer_wake.set()

    def _free(self, request_id: str) -> None:
        """Have the main thread release *request_id*'s blocks, as when all its readers had been served."""
        self._pending_completion_notifs.put(f"{request_id}:{self.world_size}".encode())

    def _no(self, request_id: str) -> No:
        return No(request_id, self.world_size, self._who)

    def _refuse(self, said: dict[str, Any]) -> None:
        """Tell the decode server's ranks, or the one that cancels, that nothing will be written (any more)."""
        self._tell(said, self._no(said["request_id"]).encode(), said.get("decode_tp_rank"))

    def _answer_lost(self, registration: dict[str, Any]) -> None:
        """Tell all ranks, which have all registered, that nothing will be written unless they register again."""
        lost = msgspec.msgpack.encode({"request_id": registration["request_id"], "lost": True})
        self._tell(registration, PUSH_REG_NOTIF_PREFIX + lost)

    @staticmethod
    def _noticing(said: dict[str, Any], notice: bytes, only_rank: int | None) -> dict[str, Any]:
        """What stands in a registration's place in the writer's inbox when somebody is to be told something."""
        return {**said, "notice": notice, "only_rank": only_rank}

    def _tell(self, said: dict[str, Any], notice: bytes, only_rank: int | None = None) -> None:
        """Send *notice* to the ranks of a decode server that this one writes to, or to one of them; later, if need be.

        Args:
            said: what it has said, with its address.
        """
        waiting = self._ensure_handshake(*_decode_server(said))
        if waiting is not None:
            later = self._noticing(said, notice, only_rank)

            def shaken(done: Future[Any]) -> None:
                if done.exception() is None:
                    self._deferred_push_inbox.put((said["request_id"], (), later))
                    self._push_writer_wake.set()

            waiting.add_done_callback(shaken)
            return
        try:
            written = self._ranks_written(said["decode_engine_id"])
            for (_, rank), agent in self._remote_agents[said["decode_engine_id"]].items():
                if rank in written and only_rank in (None, rank):
                    self.nixl_wrapper.send_notif(agent, notif_msg=notice)
        except Exception as error:  # NIXL raises what it likes
            self._log_failure(failure_type="decode_server_not_told", req_id=said["request_id"], error=error)

    def _ranks_written(self, engine_id: str) -> set[int]:
        """To which ranks of a decode server this one writes, as vLLM finds them.

        See vllm 0.32, nixl/push_worker.py, ``_xfer_blocks_for_req``.
        """
        assert self.transfer_topo is not None
        size = self.transfer_topo.get_engine_info(engine_id).remote_tp_size
        if self.use_mla and self.transfer_topo.tp_ratio(size) < 0 and not self._has_mamba:
            return set(self.dst_xfer_side_handles[engine_id])
        return set(self.tp_mappings[engine_id].all_source_ranks)

    def _notice_stall(self) -> None:
        """Forget the registrations of a time before this process stood still: their blocks may be somebody else's."""
        if not self._pulse.stood_still():
            return
        self._stalled_round = self._pulse.round
        if self._pending_d_registrations:
            dropped = list(self._pending_d_registrations.values())
            self._pending_d_registrations.clear()
            logger.warning("this server stood still: %d registrations dropped", len(dropped))
            for registration in dropped:
                self._answer_lost(registration)

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._recving_transfers:
            # What comes now is the answer that nothing does.
            failed |= done & self._given_up
            done -= failed
        elif transfers is self._sending_transfers:
            # Not before all of its writes are over; vLLM holds the lock here.
            for request_id in done:
                registration = self._writes.pop(request_id, None)
                if registration is None:
                    continue
                if request_id in failed or request_id in self._send_failures:
                    self._failed[registration["request_id"]] = time.monotonic()
                    self._say_it_failed(registration)
                else:
                    self._pushed[registration["request_id"]] = time.monotonic()
        return done, failed


def _decode_server(said: dict[str, Any]) -> tuple[str, str, int, int]:
    """Engine id, address and tensor parallel size of whoever has said this."""
    return said["decode_engine_id"], said["decode_host"], said["decode_port"], said["decode_tp_size"]


_ADDRESS = {"request_id": str, "decode_engine_id": str, "decode_host": str, "decode_port": int, "decode_tp_size": int}


def _registration(raw: bytes) -> dict[str, Any]:
    """What a decode server has sent, without what only this side writes into it.

    Raises:
        DecodeError, KeyError, TypeError, ValueError: it is none.
    """
    said: dict[str, Any] = msgspec.msgpack.decode(raw, type=dict[str, Any])
    if said.get("lost"):
        return {"request_id": str(said["request_id"]), "lost": True}
    for name, kind in _ADDRESS.items():
        if not isinstance(said[name], kind):
            raise ValueError(f"{name} is {said[name]!r}")
    if not said.get("cancelled") and not isinstance(said["local_block_ids"], list):
        raise ValueError("local_block_ids is no list")
    prompt = said.get("prompt")
    if prompt is not None and not (isinstance(prompt, list) and len(prompt) == 2):
        raise ValueError("prompt is no pair")
    return {name: value for name, value in said.items() if name not in ("notice", "unmet", "received_at")}
