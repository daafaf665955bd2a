from __future__ import annotations

import queue
import threading
import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.waiting import LOCKSTEP_SECONDS, LONGEST_SECONDS, SHORTEST_SECONDS, Bell, Naps, Ringer, patient


def test_naps_grow_with_the_wait_and_start_short_again() -> None:
    naps = Naps()
    assert naps.seconds(10.0) == SHORTEST_SECONDS
    assert naps.seconds(10.1) == pytest.approx(0.005)
    assert naps.seconds(20.0) == LONGEST_SECONDS
    naps.busy()
    assert naps.seconds(20.1) == SHORTEST_SECONDS


def test_a_ring_is_heard_by_that_engine_alone() -> None:
    ours, others = str(uuid.uuid4()), str(uuid.uuid4())
    heard, foreign = threading.Event(), threading.Event()
    Bell(ours, heard.set)
    Bell(others, foreign.set)
    Ringer(ours).ring()
    assert heard.wait(60)
    assert not foreign.is_set()


def test_ringing_where_nobody_listens_does_nothing() -> None:
    Ringer(str(uuid.uuid4())).ring()


def test_a_bell_that_is_full_holds_nobody_up() -> None:
    engine, heard, go_on = str(uuid.uuid4()), threading.Event(), threading.Event()

    def ring() -> None:
        heard.set()
        go_on.wait(60)

    Bell(engine, ring)
    ringer = Ringer(engine)
    for _ in range(10_000):
        ringer.ring()
    assert heard.wait(60)
    go_on.set()


class Stock:
    """As much of vLLM's engine core as waits and handles."""

    def __init__(self, scheduler: Any) -> None:
        self.input_queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.scheduler = SimpleNamespace(connector=SimpleNamespace(connector_scheduler=scheduler))
        self.engines_running, self.process_input_queue_block = False, True
        self.batch_queue: Any = None
        self.batch_queue_size = 2
        self.handled: list[Any] = []
        self.turns = 0

    def _process_input_queue(self) -> None:
        self.turns += 1
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())

    def _handle_client_request(self, kind: Any, request: Any) -> None:
        self.handled.append((kind, request))


class Waiter:
    def __init__(self, seconds: float) -> None:
        self.engine_id, self.seconds, self.naps_itself = str(uuid.uuid4()), seconds, True

    def patience(self) -> float:
        return self.seconds


@pytest.fixture(scope="module")
def core() -> type:
    pytest.importorskip("vllm")
    return patient(Stock)


def test_a_request_ends_the_wait_and_is_handled(core: type) -> None:
    made = core(Waiter(3600))
    threading.Timer(0.01, made.input_queue.put, [("add", "a request")]).start()
    made._process_input_queue()
    assert (made.handled, made.turns) == ([("add", "a request")], 1)


def test_a_worker_ends_the_wait(core: type) -> None:
    waiter = Waiter(3600)
    made = core(waiter)
    threading.Timer(0.01, Ringer(waiter.engine_id).ring).start()
    made._process_input_queue()
    assert [kind.name for kind, _ in made.handled] == ["WAKEUP"]
    assert not waiter.naps_itself


def test_nobody_waits_without_patience_or_beside_a_batch_under_way(core: type) -> None:
    core(Waiter(0))._process_input_queue()
    core(object())._process_input_queue()
    made = core(Waiter(3600))
    made.batch_queue = [(None, SimpleNamespace(total_num_scheduled_tokens=1), None)]
    for _ in range(5):
        made._process_input_queue()
    assert made.turns == 5


def test_with_asynchronous_scheduling_the_output_of_a_look_is_looked_at_before_the_next_wait(core: type) -> None:
    asked: list[float] = []
    made = core(Waiter(3600))
    made._await_input = asked.append
    made.batch_queue = [(None, SimpleNamespace(total_num_scheduled_tokens=0), None)]
    counts = []
    for _ in range(4):
        made._process_input_queue()
        counts.append(len(asked))
    assert counts == [0, 1, 1, 2]


def test_a_rank_whose_peers_run_waits_shortly(core: type) -> None:
    asked: list[float] = []
    made = core(Waiter(3600))
    made.engines_running = True
    made._await_input = asked.append
    made._process_input_queue()
    assert asked == [LOCKSTEP_SECONDS]


def test_a_taken_bell_leaves_the_engine_to_look_by_itself(core: type) -> None:
    waiter = Waiter(SHORTEST_SECONDS)
    first, second = core(waiter), core(waiter)
    second._process_input_queue()
    assert (first.turns, second.turns) == (0, 1)


def test_a_loop_that_cannot_wait_any_more_is_named() -> None:
    pytest.importorskip("vllm")
    from baton.engine.workarounds import HookGone

    with pytest.raises(HookGone, match=r"Bare cannot wait any more.*_process_input_queue"):
        patient(type("Bare", (), {}))
