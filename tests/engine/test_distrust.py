"""Baton's connector classes, with as much of vLLM around them as each step needs: what they do not believe."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from baton.engine import push_threads, push_worker, schedulers
from baton.engine.bounds import PushBounds
from baton.engine.counters import BatonStats
from baton.engine.held import Claim, Held
from baton.engine.push_notices import No
from baton.engine.push_worker import BatonPushWorker
from baton.engine.schedulers import BatonPullScheduler
from baton.engine.waiting import RUNG_SECONDS, SHORTEST_SECONDS, Naps
from baton.engine.workers import BatonPullWorker, LateNotices


def scheduler(pinned: set[str] = frozenset(), receiving: set[str] = frozenset()) -> Any:  # type: ignore[assignment]
    made: Any = object.__new__(BatonPullScheduler)
    made._held, made._pinned, made._receiving, made._read_early = Held(), set(pinned), set(receiving), set()
    made._loads, made._kept_blocks, made.stats = {}, {}, BatonStats()
    made._naps, made._idle, made.naps_itself = Naps(), False, False
    made._heartbeat_req_engine, made._heartbeat_by_engine, made._reqs_not_processed = {}, {}, set()
    made._reqs_in_batch = set()
    return made


def noticed(made: Any, sent: set[str], received: set[str]) -> tuple[set[str], set[str]]:
    """What vLLM's scheduler is left to act on."""
    output = KVConnectorOutput(finished_sending=set(sent), finished_recving=set(received))
    made.update_connector_output(output)
    return output.finished_sending or set(), output.finished_recving or set()


# notices that nobody waits for end vLLM's engine with an assertion, or free what is in use


def test_notices_of_what_is_awaited_pass() -> None:
    assert noticed(scheduler({"a"}, {"b"}), {"a"}, {"b"}) == ({"a"}, {"b"})


def test_notices_of_unknown_requests_are_ignored() -> None:
    assert noticed(scheduler(), {"a"}, {"b"}) == (set(), set())
    assert noticed(scheduler({"a"}, {"b"}), {"a", "x"}, {"b", "y"}) == ({"a"}, {"b"})


def test_a_notice_that_comes_twice_counts_once() -> None:
    made = scheduler({"a"}, {"b"})
    assert noticed(made, {"a"}, {"b"}) == ({"a"}, {"b"})
    assert noticed(made, {"a"}, {"b"}) == (set(), set())


def test_both_notices_of_one_request_in_one_step_are_told_apart() -> None:
    assert noticed(scheduler({"a"}), {"a"}, {"a"}) == ({"a"}, set())


def test_a_request_that_was_named_before_it_was_done_is_not_pinned_for_ever() -> None:
    made = scheduler()
    noticed(made, {"running"}, set())
    running = SimpleNamespace(request_id="running", kv_transfer_params={"do_remote_decode": True})
    made.is_bidirectional_kv_xfer_enabled = False
    assert made.request_finished(running, ([1],)) == (False, None)
    assert made._reqs_not_processed == {"running"}


# how long the engine may wait for input


def test_who_has_something_to_do_does_not_wait() -> None:
    made = scheduler({"a"})
    assert made.patience() == 0
    made._idle = True
    assert made.patience() == SHORTEST_SECONDS
    noticed(made, {"a"}, set())
    assert made.patience() == 0


def test_a_push_is_waited_for_until_it_is_rung_for() -> None:
    made = scheduler(receiving={"b"})
    made._idle, made._TRANSFER_MODE = True, "push"
    assert made.patience() == RUNG_SECONDS
    made.naps_itself = True  # nobody can wake it
    assert made.patience() == SHORTEST_SECONDS


def test_a_read_is_looked_after_often_at_first() -> None:
    made = scheduler(receiving={"b"})
    made._idle = True
    assert made.patience() == SHORTEST_SECONDS


@pytest.mark.parametrize("ticket", [{"keep_blocks": True}, {"remote_port": 1}, {"do_remote_decode": False}])
def test_the_worker_knows_whatever_is_pinned(monkeypatch: pytest.MonkeyPatch, ticket: dict[str, Any]) -> None:
    """It ends no lease of what it never heard of: with a ticket that asks for nothing blocks stayed for ever."""
    made = scheduler()
    made.is_bidirectional_kv_xfer_enabled, made.block_size = True, 4
    made.kv_cache_config = SimpleNamespace(num_blocks=100)
    pinned = {"remote_num_tokens": 4, "remote_block_ids": ([1],)}
    monkeypatch.setattr(schedulers.NixlPullConnectorScheduler, "request_finished", lambda *_: (True, dict(pinned)))
    done = SimpleNamespace(
        request_id="r",
        kv_transfer_params=ticket,
        status=RequestStatus.FINISHED_STOPPED,
        all_token_ids=[1, 2, 3, 4],
        mm_features=None,
        prompt_embeds=None,
        lora_request=None,
        cache_salt=None,
    )
    assert made.request_finished(done, ([1],))[0]
    assert made._reqs_in_batch == {"r"}


def test_what_was_sent_is_not_held_any_more() -> None:
    made = scheduler({"a"})
    made._held.keep("a", ([1],), [5], "")
    claim = Claim("a", [[1]], 1, None)
    assert made._held.problem(claim) is None
    noticed(made, {"a"}, set())
    assert made._held.problem(claim) is not None


# reads


class Asker:
    """Answers for the other engine, when it is let."""

    def __init__(self, problem: str | None) -> None:
        self.go, self._problem = threading.Event(), problem

    def problem(self, *_: Any) -> str | None:
        assert self.go.wait(20)
        return self._problem


def reader(problem: str | None = None) -> Any:
    made: Any = object.__new__(BatonPullWorker)
    made._asker, made._asking = Asker(problem), ThreadPoolExecutor(1)
    made._claims, made._answers = {}, {}
    made._recving_transfers, made._recv_failures, made.xfer_stats = {}, set(), BatonStats()
    made._recving_metadata = {}
    return made


@pytest.mark.parametrize("problem", [None, "nothing is held"])
def test_a_read_counts_when_the_other_engine_has_said_so(problem: str | None) -> None:
    made = reader(problem)
    made._recving_transfers["r"] = []
    made._claims["r"] = "host", 1, Claim("theirs", [[1]], 1, None)
    assert made._pop_done_transfers(made._recving_transfers) == (set(), set())
    made._asker.go.set()
    deadline = time.monotonic() + 20
    while (over := made._pop_done_transfers(made._recving_transfers)) == (set(), set()):
        assert time.monotonic() < deadline
    assert over == (({"r"}, set()) if problem is None else (set(), {"r"}))
    assert len(made.xfer_stats.data["refused_reads"]) == (problem is not None)


def test_a_read_without_a_claim_counts_at_once() -> None:
    made = reader()
    made._recving_transfers["r"] = []
    assert made._pop_done_transfers(made._recving_transfers) == ({"r"}, set())


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        ([[1, 2]], None),
        ([[1, 100]], "block 100 of e, which has 100"),
        ([[1, 2], [3]], "it has blocks of 2 KV cache groups, not 1"),
        ([[2, 2]], "a block stands in it twice"),
    ],
)
def test_blocks_that_cannot_be_are_not_read(blocks: list[list[int]], said: str | None) -> None:
    made = reader()
    made._remote_agents, made.dst_num_blocks = {"e": {}}, {"e": 200}
    info = SimpleNamespace(remote_physical_blocks_per_logical=2)
    made.transfer_topo = SimpleNamespace(get_engine_info=lambda _: info)
    meta = SimpleNamespace(remote=SimpleNamespace(engine_id="e", block_ids=blocks), local_block_ids=([7, 8],))
    assert made._impossible(meta) == said
    if said is not None:
        made._recving_metadata["r"] = meta
        made._read_blocks_for_req("r", meta)
        assert made._recv_failures == {"r"}


def test_only_a_reads_notice_is_kept_back() -> None:
    seen: list[dict[str, Any]] = []
    agent = LateNotices(SimpleNamespace(name="a", make_prepped_xfer=lambda *_, **more: seen.append(more)))
    agent.make_prepped_xfer("READ", 1, [2], 3, [4], notif_msg=b"n")
    agent.make_prepped_xfer("WRITE", 1, [2], 3, [4], notif_msg=b"n")
    assert seen == [{}, {"notif_msg": b"n"}]
    assert agent.name == "a"


# writes


def pusher() -> Any:
    made: Any = object.__new__(BatonPushWorker)
    made._awaited, made._given_up, made._unanswered, made._patience = {}, set(), {}, 5.0
    made._bounds, made._lost = PushBounds(), queue.SimpleQueue()
    made._recving_metadata, made._recving_transfers, made._sending_transfers = {}, {}, {}
    made._reg_send_inbox, made._failed_recv_reqs = queue.Queue(), queue.Queue()
    made._pending_completion_notifs = push_threads.Ringing(cast(Any, SimpleNamespace(ring=lambda: None)))
    made._push_writer_wake, made.tp_rank, made.xfer_stats = threading.Event(), 0, BatonStats()
    made._prompts, made._push_finished_blocks, made._reqs_to_process = {}, {}, {"p-1"}
    made._cancelled_at, made._meeting, made._pushed, made._over, made._posted = {}, {}, {}, {}, []
    made._cancellations, made._spoken, made._registered = {}, {}, set()
    made._failed, made._delays, made._who = {}, {}, "0.0"
    made._writes, made._send_failures, made._deferred_push_inbox = {}, set(), queue.Queue()
    made._sending_transfers_lock, made.world_size, made.use_mla = threading.Lock(), 1, False
    made.transfer_topo = SimpleNamespace(get_engine_info=lambda _: SimpleNamespace(remote_tp_size=1))
    made.tp_mappings = {"d": SimpleNamespace(all_source_ranks=(0,))}
    made._ensure_handshake = lambda *_: None
    return made


REGISTRATION = {
    "request_id": "d-1",
    "decode_engine_id": "d",
    "decode_host": "h",
    "decode_port": 1,
    "decode_tp_size": 1,
    "local_block_ids": ([4],),
    "prompt": [3, b"digest"],
    "received_at": float("inf"),
}
SAYS_NO = No("d-1", 1, "0.0").encode()


def test_notices_are_rung_for_but_for_renewed_leases() -> None:
    rings: list[None] = []
    notices = push_threads.Ringing(cast(Any, SimpleNamespace(ring=lambda: rings.append(None))))
    notices.put(b"HB:a,b")
    assert rings == []
    notices.put(b"d-1:1")
    assert (len(rings), notices.get_nowait(), notices.get_nowait()) == (1, b"HB:a,b", b"d-1:1")


def test_a_push_that_never_comes_is_given_up_in_time() -> None:
    """vLLM logs it and lets the decode server's blocks wait for ever."""
    made = pusher()
    made._awaited["d-1"] = 100.0, REGISTRATION
    made._recving_metadata["d-1"] = object()
    made._lose_patience(99.0)
    assert made._reg_send_inbox.empty()
    made._lose_patience(101.0)
    name, sent = made._reg_send_inbox.get_nowait()
    assert (name, sent["cancelled"], sent["registered"], sent["decode_tp_rank"]) == ("d-1", True, True, 0)
    assert made._unanswered == {"d-1": 101.0 + PushBounds().answer_seconds}
    # P answers as if the push were complete: for this request it is the end all the same.
    made._recving_transfers["d-1"] = []
    assert made._pop_done_transfers(made._recving_transfers) == (set(), {"d-1"})


def test_a_push_that_came_is_not_given_up() -> None:
    made = pusher()
    made._awaited["d-1"] = 100.0, REGISTRATION
    made._lose_patience(101.0)
    assert made._reg_send_inbox.empty()
    assert made._awaited == {}


def test_a_no_fails_the_request_and_other_notices_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pusher()
    made._recving_metadata["d-1"] = SimpleNamespace(pp_size=1)
    for notice in (b"HB:a", SAYS_NO, SAYS_NO):
        made._pending_completion_notifs.put(notice)
    monkeypatch.setattr(push_worker.NixlPushConnectorWorker, "_get_new_notifs", lambda _: {"done"})
    assert made._get_new_notifs() == {"done"}
    # It counts once, as the end of that rank's part, and what ends so has failed.
    left = [made._pending_completion_notifs.get_nowait() for _ in range(2)]
    assert left == [b"HB:a", b"d-1:1"]
    assert made._pending_completion_notifs.empty()
    made._recving_transfers["d-1"] = []
    assert made._pop_done_transfers(made._recving_transfers) == (set(), {"d-1"})


@pytest.mark.parametrize("ours", [(3, b"another"), (4, b"digest")])
def test_another_prompt_is_not_pushed_and_its_own_may_still_come(ours: tuple[int, bytes]) -> None:
    made, told = pusher(), []
    made._prompts["p-1"] = ours
    made._remote_agents = {"d": {(0, 0): "agent"}}
    made.nixl_wrapper = SimpleNamespace(send_notif=lambda agent, notif_msg: told.append((agent, notif_msg)))
    made._do_start_push_kv("p-1", ([9],), REGISTRATION)
    assert told == [("agent", SAYS_NO)]
    assert made._push_finished_blocks == {"p-1": ([9],)}


@pytest.mark.parametrize("fails", [True, False])
def test_a_write_that_failed_is_told_to_who_waits_for_it(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """vLLM keeps it to itself, and the decode server holds its blocks for minutes."""
    made = pusher()
    made._sending_transfers["p-1"] = [1]
    monkeypatch.setattr(push_worker.NixlPushConnectorWorker, "_do_start_push_kv", lambda *_: None)
    made._do_start_push_kv("p-1", ([9],), REGISTRATION)
    assert made._is_written("d-1")
    over = ({"p-1"}, {"p-1"}) if fails else ({"p-1"}, set())
    monkeypatch.setattr(push_worker.NixlPushConnectorWorker, "_pop_done_transfers", lambda *_: over)
    made._pop_done_transfers(made._sending_transfers)
    assert made._writes == {}
    assert made._deferred_push_inbox.empty() is not fails
    if fails:
        told: list[bytes] = []
        made._remote_agents = {"d": {(0, 0): "agent"}}
        made.nixl_wrapper = SimpleNamespace(send_notif=lambda _, notif_msg: told.append(notif_msg))
        made._do_start_push_kv(*made._deferred_push_inbox.get_nowait())
        assert told == [SAYS_NO]


def test_a_write_that_could_not_begin_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pusher()

    def refuse(worker: Any, request_id: str, *_: Any) -> None:
        worker._send_failures.add(request_id)

    monkeypatch.setattr(push_worker.NixlPushConnectorWorker, "_do_start_push_kv", refuse)
    made._do_start_push_kv("p-1", ([9],), REGISTRATION)
    assert made._deferred_push_inbox.get_nowait()[2]["notice"] == SAYS_NO


def test_the_same_prompt_is_pushed(monkeypatch: pytest.MonkeyPatch) -> None:
    made, pushed = pusher(), []
    made._prompts["p-1"] = 3, b"digest"
    monkeypatch.setattr(
        push_worker.NixlPushConnectorWorker, "_do_start_push_kv", lambda _, *all_of: pushed.append(all_of)
    )
    made._do_start_push_kv("p-1", ([9],), REGISTRATION)
    assert pushed == [("p-1", ([9],), REGISTRATION)]
