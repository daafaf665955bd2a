"""Write mode: what vLLM's push connector lacks so that nothing is left behind when a leg is given up.

Subclasses of vLLM 0.32's push scheduler and worker (distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py and
push_worker.py). There a decode server that waits for a push holds its blocks until the push comes, and a prefill server
that has finished holds its own until its lease ends; neither is told that the other's leg was given up. Here the
decode server says so:

1. D's request is aborted before its KV cache has come: D's worker sends P a registration that says ``cancelled``.
2. P drops D's registration, now or when it comes, frees the request's blocks if it is done and will free them when it
   gets done, and answers as if the push were complete. What it is pushing already it completes.
3. D frees its blocks with that answer. Without one for :attr:`PushBounds.answer_seconds` P is dead, or has stood still:
   such a P drops every registration it held when it wakes (:attr:`PushBounds.stall_seconds`), so that it never writes
   into blocks that are somebody else's by then.
4. A P that drops a registration says so, and D registers again what it still waits for.

D gives up by itself what is not pushed within ``push_registration_timeout`` (vLLM only logs it), in the same way, and
fails the request. And P pushes only what was registered for the same prompt: else it says no, and D's request fails.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sized
from concurrent.futures import Future
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from baton.engine.bounds import PushBounds
from baton.engine.held import digest
from baton.engine.schedulers import Watchful, salt_of
from baton.engine.waiting import Ringer
from baton.engine.workers import Counting

logger = logging.getLogger("vllm.baton")

POLL_SECONDS = 0.05
"""How often a worker that has nothing in flight looks for notifications: nobody wakes it for a cancellation."""

AWAITING_POLL_SECONDS = 0.002
AWAITING_SHARE = 0.01
"""How often one looks that waits for a push: after two milliseconds, or a hundredth of the wait so far."""

NO = b"BATON-NO:"
"""How a notice begins by which P says that it won't push for a registration that names its ``prompt``: only ours do."""

HEARTBEAT = b"HB:"
"""How vLLM's notices begin that only renew leases (nixl/base_worker.py, ``_send_heartbeats``): no hurry."""

REMEMBER_SECONDS = 600.0
"""How long a prefill server remembers that a request was cancelled which it has not finished yet."""


class BatonPushScheduler(Watchful, NixlPushConnectorScheduler):
    """Tells the worker which registered requests were given up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._registered: dict[str, dict[str, Any]] = {}
        self._cancelled: dict[str, dict[str, Any]] = {}
        self._prompts: dict[str, tuple[int, bytes | None]] = {}

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ticket = request.kv_transfer_params
        if ticket and ticket.get("do_remote_prefill"):
            # Nobody reads it in this mode, but vLLM looks it up, and the engine would end for the lack of it.
            ticket.setdefault("remote_request_id", request.request_id)
            if num_external_tokens <= 0:
                # The whole prompt is in this server's own cache: nothing is registered, and P shall not wait for it.
                self._cancelled[request.request_id] = self._address(request, registered=False)
                ticket["do_remote_prefill"] = False
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if request.request_id in self._push_pending_registrations:
            self._push_pending_registrations[request.request_id] |= {"prompt": self._claim(request)}
            self._registered[request.request_id] = self._address(request, registered=True)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        ticket = request.kv_transfer_params
        registered = self._registered.pop(request.request_id, None)
        if registered is not None:
            self._cancelled[request.request_id] = registered
            if self._push_pending_registrations.pop(request.request_id, None) is not None:
                registered["registered"] = False
        elif ticket and ticket.get("do_remote_prefill"):
            # Given up before it was scheduled. vLLM would have the worker wait for a push that never comes.
            self._cancelled[request.request_id] = self._address(request, registered=False)
            ticket["do_remote_prefill"] = False
            self._stop_heartbeat(request.request_id)
            return False, None
        delayed, made = super().request_finished(request, block_ids)
        if delayed and made is not None:
            tokens, salt = request.num_prompt_tokens, salt_of(request)
            said = None if salt is None else digest(request.all_token_ids[:tokens], salt)
            self._prompts[request.request_id] = tokens, said
        return delayed, made

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self._registered.pop(request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cancelled, self._cancelled = self._cancelled, {}
        meta = super().build_connector_meta(scheduler_output)
        meta.push_cancellations = cancelled
        meta.push_prompts, self._prompts = self._prompts, {}
        return meta

    def has_pending_push_work(self) -> bool:
        return bool(self._cancelled) or super().has_pending_push_work()

    def _address(self, request: Any, *, registered: bool) -> dict[str, Any]:
        """A cancellation of *request*: where it goes, who sends it, and whether an answer is awaited."""
        ticket = request.kv_transfer_params
        return {
            "request_id": request.request_id,
            "cancelled": True,
            "registered": registered,
            "decode_engine_id": self.engine_id,
            "decode_host": self.side_channel_host,
            "decode_port": self.side_channel_port,
            "decode_tp_size": self.vllm_config.parallel_config.tensor_parallel_size,
            "remote_engine_id": ticket["remote_engine_id"],
            "remote_host": ticket["remote_host"],
            "remote_port": ticket["remote_port"],
            "remote_tp_size": ticket["tp_size"],
            "remote_pp_size": ticket.get("pp_size") or 1,
        }


class _Polling(threading.Event):
    """An event whose waiter looks again by itself, often while *awaited* is not empty."""

    def __init__(self, awaited: Sized) -> None:
        super().__init__()
        self._awaited = awaited
        self._since = 0.0

    def set(self) -> None:
        self._since = time.monotonic()
        super().set()

    def wait(self, timeout: float | None = None) -> bool:
        if timeout is None:
            waited = AWAITING_SHARE * (time.monotonic() - self._since) if len(self._awaited) else POLL_SECONDS
            timeout = min(max(waited, AWAITING_POLL_SECONDS), POLL_SECONDS)
        return super().wait(timeout)


class _Ringing(queue.Queue[bytes]):
    """Notices for the worker's main thread, which nobody but the engine core's steps makes run: they are rung for."""

    def __init__(self, ringer: Ringer) -> None:
        super().__init__()
        self._ringer = ringer

    def put(self, item: bytes, block: bool = True, timeout: float | None = None) -> None:
        super().put(item, block, timeout)
        if not item.startswith(HEARTBEAT):
            self._ringer.ring()


class _Pulse(threading.Event):
    """What vLLM's writer asks in each round whether to stop; knows from it whether the process stood still."""

    def __init__(self, stall_seconds: float) -> None:
        super().__init__()
        self._stall_seconds = stall_seconds
        self._asked_at = time.monotonic()
        self._stood_still = False

    def is_set(self) -> bool:
        self._look()
        return super().is_set()

    def _look(self) -> None:
        now = time.monotonic()
        self._stood_still |= now - self._asked_at > self._stall_seconds
        self._asked_at = now

    def stood_still(self) -> bool:
        """Whether it did since the last time this was asked."""
        self._look()
        stood_still, self._stood_still = self._stood_still, False
        return stood_still


class BatonPushWorker(Counting, NixlPushConnectorWorker):
    """Sends and obeys cancellations; see the module's text.

    What sends and matches runs in vLLM's writer thread, the rest in the worker's main thread.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._bounds = PushBounds.read(args[0].kv_transfer_config.get_from_extra_config)
        self._ringer = Ringer(self.engine_id)
        self._push_writer_wake = _Polling(self._recving_metadata)
        self._pending_completion_notifs = _Ringing(self._ringer)
        self._push_writer_stop = self._pulse = _Pulse(self._bounds.stall_seconds)
        # decode, the main thread's: registrations under way, and those cancelled and unanswered, by request, with the
        # time when each is given up
        self._unanswered: dict[str, float] = {}
        self._awaited: dict[str, tuple[float, dict[str, Any]]] = {}
        self._given_up: set[str] = set()
        # decode: registrations that a prefill server says it has dropped; from the writer to the main thread
        self._lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        extra = self.vllm_config.kv_transfer_config.get_from_extra_config
        self._patience = float(extra("push_registration_timeout", extra("decoder_kv_blocks_ttl", 480)))
        # prefill: the writer's
        self._cancelled_at: dict[str, float] = {}
        self._pushing: set[str] = set()
        self._writes: dict[str, dict[str, Any]] = {}
        self._prompts: dict[str, tuple[int, bytes | None]] = {}

    # decode

    def start_load_kv(self, metadata: Any) -> None:
        self._prompts.update(getattr(metadata, "push_prompts", {}))
        super().start_load_kv(metadata)
        until = time.monotonic() + self._patience
        self._awaited.update({name: (until, said) for name, said in metadata.push_registrations.items()})
        cancelled = getattr(metadata, "push_cancellations", None) or {}
        for request_id, cancellation in cancelled.items():
            self._reg_send_inbox.put((request_id, {**cancellation, "decode_tp_rank": self.tp_rank}))
            if cancellation["registered"]:
                self._unanswered[request_id] = time.monotonic() + self._bounds.answer_seconds
            elif request_id in self._recving_metadata:
                self._recving_transfers.setdefault(request_id, [])
        if cancelled:
            self._push_writer_wake.set()

    def get_transfer_results(self) -> Any:
        now = time.monotonic()
        self._lose_patience(now)
        for request_id, until in list(self._unanswered.items()):
            if request_id not in self._recving_metadata:
                del self._unanswered[request_id]
            elif now > until:
                logger.warning("nobody answers the cancellation of %s: its blocks are freed", request_id)
                del self._unanswered[request_id]
                self._failed_recv_reqs.put(request_id)
        self._register_again()
        results = super().get_transfer_results()
        for request_id in results.finished_sending:
            self._prompts.pop(request_id, None)
            self._writes.pop(request_id, None)
        self._given_up -= results.finished_recving
        return results

    def _register_again(self) -> None:
        """What a prefill server has dropped and is still wanted."""
        again = False
        while not self._lost.empty():
            request_id = self._lost.get()
            awaited = self._awaited.get(request_id)
            if request_id in self._recving_metadata and awaited is not None and request_id not in self._unanswered:
                logger.warning("the registration of %s was dropped: it is sent again", request_id)
                self._reg_send_inbox.put((request_id, awaited[1]))
                again = True
        if again:
            self._push_writer_wake.set()

    def _lose_patience(self, now: float) -> None:
        """Give up what nobody has pushed for so long: P is told, and the request fails with its answer or without."""
        for request_id, (until, said) in list(self._awaited.items()):
            if request_id not in self._recving_metadata:
                del self._awaited[request_id]
            elif now > until:
                del self._awaited[request_id]
                logger.warning("nobody has pushed for %s in %g s: it is given up", request_id, self._patience)
                self._given_up.add(request_id)
                self._unanswered[request_id] = now + self._bounds.answer_seconds
                cancellation = {**said, "cancelled": True, "registered": True, "decode_tp_rank": self.tp_rank}
                self._reg_send_inbox.put((request_id, cancellation))
                self._push_writer_wake.set()

    def _get_new_notifs(self) -> set[str]:
        for _ in range(self._pending_completion_notifs.qsize()):
            notice = self._pending_completion_notifs.get()
            if notice.startswith(NO):
                request_id = notice.removeprefix(NO).decode(errors="replace")
                logger.warning("nothing is pushed for %s: the other engine holds another prompt", request_id)
                self.xfer_stats.add("refused_reads")
                self._failed_recv_reqs.put(request_id)
            else:
                # Without a ring: this is the step that was rung for.
                queue.Queue.put(self._pending_completion_notifs, notice)
        made: set[str] = super()._get_new_notifs()
        return made

    # prefill

    def _handle_push_reg_notif(self, notif: bytes) -> None:
        self._notice_stall()
        try:
            registration = msgspec.msgpack.decode(notif[len(PUSH_REG_NOTIF_PREFIX) :])
            request_id = registration["request_id"]
        except (msgspec.DecodeError, KeyError, TypeError):
            logger.warning("a registration that cannot be read was dropped")
            return
        if registration.get("lost"):
            self._lost.put(request_id)
            self._ringer.ring()
        elif registration.get("cancelled"):
            self._cancel(request_id, registration)
        elif get_base_request_id(request_id) not in self._cancelled_at:
            super()._handle_push_reg_notif(notif)

    def _cancel(self, request_id: str, cancellation: dict[str, Any]) -> None:
        now = time.monotonic()
        self._cancelled_at = {
            base: since for base, since in self._cancelled_at.items() if now - since < REMEMBER_SECONDS
        }
        if request_id in self._pushing:
            return  # its completion is the answer
        self._cancelled_at[get_base_request_id(request_id)] = now
        self._pending_d_registrations.pop(request_id, None)
        finished = self._pop_matching_finished_blocks(request_id)
        if finished is not None:
            self._free(finished[0])
        if cancellation["registered"]:
            self._answer(request_id, cancellation)

    def _pop_matching_registration(self, request_id: str) -> dict[str, Any] | None:
        self._notice_stall()
        if get_base_request_id(request_id) in self._cancelled_at:
            return {"request_id": request_id, "cancelled": True, "registered": False}
        found: dict[str, Any] | None = super()._pop_matching_registration(request_id)
        return found

    def _do_start_push_kv(self, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]) -> None:
        if registration_data.get("refused"):
            self._tell(registration_data, NO + registration_data["request_id"].encode())
            return
        if registration_data.get("cancelled"):
            if registration_data["registered"]:
                self._answer(request_id, registration_data)
            else:
                self._free(request_id)
            return
        wanted, ours = registration_data.get("prompt"), self._prompts.get(request_id)
        if wanted and ours and None not in (wanted[1], ours[1]) and tuple(wanted) != ours:
            logger.warning("%s is not pushed to %s: another prompt", request_id, registration_data["request_id"])
            # Whoever is meant may still come.
            self._push_finished_blocks[request_id] = local_block_ids
            self._do_start_push_kv(request_id, (), {**registration_data, "refused": True})
            return
        self._pushing.add(registration_data["request_id"])
        self._writes[request_id] = registration_data
        super()._do_start_push_kv(request_id, local_block_ids, registration_data)
        if request_id in self._send_failures:
            self._say_it_failed(request_id)

    def _say_it_failed(self, request_id: str) -> None:
        """Have the writer tell the decode server that a write failed: it would wait, and hold its blocks, for minutes.

        Our own blocks stay until their lease ends.
        """
        registration = self._writes.pop(request_id, None)
        if registration is not None:
            logger.warning("what was to be written for %s was not", registration["request_id"])
            self._deferred_push_inbox.put((request_id, (), {**registration, "refused": True}))
            self._push_writer_wake.set()

    def _free(self, request_id: str) -> None:
        """Have the main thread release *request_id*'s blocks, as when all its readers had been served."""
        self._pending_completion_notifs.put(f"{request_id}:{self.world_size}".encode())

    def _answer(self, request_id: str, cancellation: dict[str, Any]) -> None:
        """Tell the decode server's rank that nothing will be written for *request_id* any more.

        Or all its ranks, that nothing will unless they register again, when *cancellation* is a registration that was
        ``lost``.
        """
        if cancellation.get("lost"):
            # Every rank of the decode server has registered.
            lost = msgspec.msgpack.encode({"request_id": request_id, "lost": True})
            self._tell(cancellation, PUSH_REG_NOTIF_PREFIX + lost)
        else:
            self._tell(cancellation, f"{request_id}:{self.world_size}".encode(), cancellation["decode_tp_rank"])

    def _tell(self, said: dict[str, Any], notice: bytes, only_rank: int | None = None) -> None:
        """Send *notice* to the decode server that has *said* something, or to one rank of it; later, if need be."""
        engine_id, request_id = said["decode_engine_id"], said["request_id"]
        waiting = self._ensure_handshake(engine_id, said["decode_host"], said["decode_port"], said["decode_tp_size"])
        if waiting is not None:

            def shaken(done: Future[Any]) -> None:
                if done.exception() is None:
                    self._deferred_push_inbox.put((request_id, (), said))
                    self._push_writer_wake.set()

            waiting.add_done_callback(shaken)
            return
        try:
            for (_, rank), agent in self._remote_agents[engine_id].items():
                if only_rank in (None, rank):
                    self.nixl_wrapper.send_notif(agent, notif_msg=notice)
        except Exception as error:  # NIXL raises what it likes
            self._log_failure(failure_type="decode_server_not_told", req_id=request_id, error=error)

    def _notice_stall(self) -> None:
        """Forget the registrations of a time before this process stood still: their blocks may be somebody else's."""
        if self._pulse.stood_still() and self._pending_d_registrations:
            dropped = dict(self._pending_d_registrations)
            self._pending_d_registrations.clear()
            logger.warning("this server stood still: %d registrations dropped", len(dropped))
            for request_id, registration in dropped.items():
                self._answer(request_id, {**registration, "cancelled": True, "registered": True, "lost": True})

    def _pop_done_transfers(self, transfers: Any) -> tuple[set[str], set[str]]:
        done, failed = super()._pop_done_transfers(transfers)
        if transfers is self._recving_transfers:
            # What comes now is the answer that nothing does.
            failed |= done & self._given_up
            done -= failed
        elif transfers is self._sending_transfers:
            for request_id in failed:
                self._say_it_failed(request_id)
            for request_id in done:
                self._writes.pop(request_id, None)
            if not transfers:
                self._pushing.clear()
        return done, failed
