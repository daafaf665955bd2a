"""Write mode: what vLLM's push connector lacks so that nothing is left behind when a leg is given up.

Subclasses of vLLM 0.32's push scheduler and worker (distributed/kv_transfer/kv_connector/v1/nixl/push_scheduler.py and
push_worker.py). There a decode server that waits for a push holds its blocks until the push comes, and a prefill server
that has finished holds its own until its lease ends; neither is told that the other's leg was given up. Here the
decode server says so:

1. D renews every registration while it waits, several times in :attr:`PushBounds.stall_seconds`; P trusts none that was
   not renewed for so long, by when it was sent, and begins no push for it.
2. D's request is aborted before its KV cache has come: D's worker sends P a registration that says ``cancelled``, again
   and again until it is answered, and renews no more.
3. P drops D's registration, now or when it comes, frees the request's blocks if it is done and will free them when it
   gets done, and says no. What it is pushing already it completes, and says so.
4. D frees its blocks when every rank of P that writes to it has completed or said no. Without an answer for
   :attr:`PushBounds.answer_seconds`, twice as long or more as P trusts a registration, P is dead, or cannot be reached,
   or has stood still and drops what it held: it begins no write. One that has said it is at the push is waited for as
   long as for a push.
5. A P that drops registrations since it stood still says so, and D registers again what it still waits for.
6. P's lease on blocks does not end while they are pushed, and what comes after its end is told no. D's heartbeats renew
   it: in this mode they name D's own request, which P knows by what the two ids have in common.

D gives up by itself what is not pushed within ``push_registration_timeout`` (vLLM only logs it), in the same way, and
fails the request. And P pushes only what was registered for the same prompt: else it says no, and D's request fails.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import NixlPushConnectorScheduler

from baton.engine.held import digest
from baton.engine.schedulers import Watchful, salt_of


class BatonPushScheduler(Watchful, NixlPushConnectorScheduler):
    """Tells the worker which registered requests were given up."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._registered: dict[str, dict[str, Any]] = {}
        self._cancelled: dict[str, dict[str, Any]] = {}
        self._prompts: dict[str, tuple[int, bytes | None]] = {}

    def on_new_request(self, request: Any) -> None:
        ticket = request.kv_transfer_params
        if ticket and ticket.get("do_remote_prefill"):
            # Heartbeats name it: P knows its own by what the two ids have in common, whatever the ticket says.
            ticket["remote_request_id"] = request.request_id
        super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ticket = request.kv_transfer_params
        if ticket and ticket.get("do_remote_prefill"):
            # vLLM looks it up, and the engine would end for the lack of it.
            ticket.setdefault("remote_request_id", request.request_id)
            if num_external_tokens <= 0:
                # The whole prompt is in this server's own cache: nothing is registered, and P shall not wait for it.
                self._cancelled[request.request_id] = self._address(request, registered=False)
                self._stop_heartbeat(request.request_id)
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
