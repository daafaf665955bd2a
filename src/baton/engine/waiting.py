"""How an engine that only waits sleeps, and what wakes it.

vLLM's engine loop (0.32, v1/engine/core.py) goes on stepping while a request waits for a KV cache or a kept block for
its reader: a core burnt, on a shared machine taken from the very server that is waited for. A step of no tokens
costs milliseconds. Here the loop waits on its queue of requests for as long as the connector's scheduler is
patient, so that a new request is served at once, and a worker's thread that sees something come rings the
:class:`Bell`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("vllm.baton")

SHORTEST_SECONDS = 0.0005
LONGEST_SECONDS = 0.05
SHARE = 0.05
"""Of the time waited so far: what a nap may add to it."""

RUNG_SECONDS = 0.5
"""The longest nap of who is rung for: only bounds of time are looked after then."""

LOCKSTEP_SECONDS = 0.002
"""The longest nap of a data parallel rank whose peers may be decoding: each of their steps waits for it."""


class Naps:
    """Naps that grow with the wait: they add a twentieth to it, and at most :data:`LONGEST_SECONDS`."""

    def __init__(self) -> None:
        self._since: float | None = None

    def busy(self) -> None:
        """Something was done: the next wait begins anew."""
        self._since = None

    def seconds(self, now: float) -> float:
        """How long to sleep at *now*, in seconds, since there is nothing to do."""
        if self._since is None:
            self._since = now
        return min(max((now - self._since) * SHARE, SHORTEST_SECONDS), LONGEST_SECONDS)


def bell_address(engine_id: str) -> str:
    """The abstract Unix address where the engine core *engine_id* (of one data parallel rank) hears its workers."""
    return "\0baton-bell-" + hashlib.sha256(engine_id.encode()).hexdigest()[:32]


class Bell:
    """Calls *ring*, in a thread of its own, each time one of the engine's workers rings."""

    def __init__(self, engine_id: str, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(bell_address(engine_id))
        threading.Thread(target=self._listen, name="baton-bell", daemon=True).start()

    def _listen(self) -> None:
        while True:
            self._socket.recv(1)
            self._ring()


class Ringer:
    """A worker's side of its engine core's bell. Where nobody listens, or on another host, ringing does nothing."""

    def __init__(self, engine_id: str) -> None:
        self._address = bell_address(engine_id)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def ring(self) -> None:
        # Without a bell the engine looks by itself; one that is full will be heard.
        with contextlib.suppress(OSError):
            self._socket.sendto(b"!", self._address)


def patient(stock: type) -> type:
    """A subclass of vLLM's engine core process that waits for input as long as its connector's scheduler is patient.

    A scheduler is patient when it has a method ``patience`` that gives seconds, and ``engine_id``.

    Raises:
        HookGone: vLLM's class has no loop that could wait any more.
    """
    from baton.engine.workarounds import HookGone

    try:
        from vllm.v1.engine import EngineCoreRequestType

        wake_up = EngineCoreRequestType.WAKEUP
        _ = stock._process_input_queue, stock._handle_client_request  # type: ignore[attr-defined]
    except (ImportError, AttributeError) as error:
        raise HookGone(f"{stock.__module__}.{stock.__name__} cannot wait any more: {error}") from error

    class PatientEngineCore(stock):
        _patient_scheduler: Any = None
        _idle_steps = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            connector = getattr(self.scheduler, "connector", None)
            scheduler: Any = getattr(connector, "connector_scheduler", None)
            if not hasattr(scheduler, "patience"):
                return
            scheduler.naps_itself = False
            self._patient_scheduler = scheduler
            try:
                self._bell = Bell(scheduler.engine_id, lambda: self.input_queue.put_nowait((wake_up, None)))
            except OSError as error:
                logger.warning("no worker can wake this engine (%s): it looks by itself", error)

        def _process_input_queue(self) -> None:
            if self._patient_scheduler is not None and self.process_input_queue_block:
                seconds = self._patient_scheduler.patience()
                self._idle_steps = self._idle_steps + 1 if seconds else 0
                if seconds and self._has_seen_all():
                    self._await_input(min(seconds, LOCKSTEP_SECONDS) if self.engines_running else seconds)
                    self._idle_steps = 0
            super()._process_input_queue()

        def _has_seen_all(self) -> bool:
            """Whether no step is under way that computes, or may have seen a transfer end.

            With asynchronous scheduling the last step's output is looked at after the next one has begun.
            """
            if not self.batch_queue:
                return True
            computes = any(batch.total_num_scheduled_tokens for _, batch, *_ in self.batch_queue)
            return not computes and self._idle_steps >= self.batch_queue_size

        def _await_input(self, seconds: float) -> None:
            try:
                wanted = self.input_queue.get(timeout=seconds)
            except queue.Empty:
                return
            self._handle_client_request(*wanted)

    PatientEngineCore.__name__ = stock.__name__
    PatientEngineCore.__qualname__ = stock.__qualname__
    return PatientEngineCore
