"""Write mode when something breaks at a bad moment: no block is somebody else's while it may still be written to.

Two sides in this process over real NIXL; what NIXL would take long for is held up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.v1.request import RequestStatus

from baton.engine.push_notices import Done, No, Still, read
from tests.engine.sides import TOKENS, Side, over, request_of, until

pytestmark = pytest.mark.usefixtures("one_rank")

OURS, THEIRS = "cmpl-a-0-11111111", "cmpl-a-0-22222222"
"""The prefill and the decode server's ids of one request."""

BLOCKS, TAKEN = [3, 5, 4], [7, 8, 9]
STALL_SECONDS = 1.0


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    bounds = {"push_stall_seconds": STALL_SECONDS, "push_answer_seconds": 6 * STALL_SECONDS}
    mode = getattr(request, "param", "write")
    made = tuple(Side(f"{name}-{time.monotonic_ns()}", mode, monkeypatch, **bounds) for name in "pd")
    yield made  # type: ignore[misc]
    for side in made:
        side.close()


def ticket(p: Side, **more: Any) -> dict[str, Any]:
    where = {"remote_engine_id": p.worker.engine_id, "remote_host": "127.0.0.1", "remote_port": p.port}
    return {"do_remote_prefill": True, "tp_size": 1, **where, **more}


def abort(side: Side, request: Any) -> None:
    request.status = RequestStatus.FINISHED_ABORTED
    side.scheduler.request_finished(request, ([],))
    side.step()


class Held:
    """Writes of a side that are under way as long as this says so."""

    def __init__(self, side: Side) -> None:
        self.still = True
        stock = side.worker._peers.check_xfer_state
        side.worker._peers.check_xfer_state = lambda handle: "PROC" if self.still else stock(handle)


def lose(side: Side, other: Side) -> None:
    """As when a notice to *other* has failed."""
    side.worker._peers.lost.update(side.worker._remote_agents[other.worker.engine_id].values())


def slow_handshakes(side: Side) -> tuple[threading.Event, threading.Event]:
    """Handshakes of *side* wait: set once one has begun, and to be set for them to go on."""
    begun, go, stock = threading.Event(), threading.Event(), side.worker._nixl_handshake

    def shake(*args: Any) -> Any:
        begun.set()
        assert go.wait(60)
        return stock(*args)

    side.worker._nixl_handshake = shake
    return begun, go


def swallow_completions(side: Side) -> None:
    """*side* never hears that a push was complete, as while it is still going."""
    stock = side.worker._pending_completion_notifs.put

    def put(notice: bytes, *more: Any) -> None:
        if read(notice) is not None or notice.startswith(b"HB:"):
            stock(notice, *more)

    side.worker._pending_completion_notifs.put = put


def test_notices_are_read_as_they_are_written() -> None:
    for notice in (No("a:b", 2, "0.1"), Done("a:b", 2, "0.1"), Still("a:b")):
        assert read(notice.encode()) == notice
    assert No("a:b", 2, "0.1").as_completion() == b"a:b:2"
    for other in (b"a:1", b"HB:a", b"BATON-NO:a", b"BATON-NO:a:b:c", b"BATON-NO:\xff:x:0"):
        assert read(other) is None


def test_who_cannot_be_told_of_a_cancellation_trusts_no_registration_that_is_not_renewed(
    sides: tuple[Side, Side],
) -> None:
    p, d = sides
    request = d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    lose(d, p)

    def unreachable(*_: Any) -> Any:
        raise TimeoutError("no network")

    d.worker._nixl_handshake = unreachable
    abort(d, request)
    registration = p.worker._pending_d_registrations[THEIRS]
    until(lambda: p.worker._is_old(registration), p, d)
    assert not d.received | d.failed
    before = d.block(TAKEN[0]).clone()
    p.prefill(OURS, TOKENS, BLOCKS)
    until(lambda: THEIRS in d.received | d.failed, p, d)
    assert torch.equal(d.block(TAKEN[0]), before)
    assert p.worker._push_finished_blocks
    assert not p.worker._writes


def test_a_registration_is_renewed_as_long_as_it_is_awaited(sides: tuple[Side, Side]) -> None:
    p, d = sides
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    first = p.worker._pending_d_registrations[THEIRS]
    until(lambda: p.worker._is_old(first), p, d)
    p.prefill(OURS, TOKENS, BLOCKS)
    assert over(d, THEIRS, p)
    assert torch.equal(d.block(TAKEN[0]), p.block(BLOCKS[0]))


def test_one_that_was_too_old_is_taken_up_again_when_it_is_renewed(sides: tuple[Side, Side]) -> None:
    p, d = sides
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    d.worker._renew_at = float("inf")
    registration = p.worker._pending_d_registrations[THEIRS]
    until(lambda: p.worker._is_old(registration), p)
    p.prefill(OURS, TOKENS, BLOCKS)
    until(lambda: p.worker._push_finished_blocks, p)
    d.worker._renew_at = 0.0
    assert over(d, THEIRS, p)


def test_no_lease_ends_under_a_write(sides: tuple[Side, Side]) -> None:
    p, d = sides
    held = Held(p)
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    until(lambda: p.worker._sending_transfers, p, d)
    p.worker._reqs_to_send[OURS] = time.perf_counter() - 1
    p.step()
    assert not p.sent
    assert p.worker._reqs_to_send[OURS] > time.perf_counter()
    held.still = False
    assert over(d, THEIRS, p)
    until(lambda: p.sent == {OURS}, p)


def test_what_comes_after_a_lease_has_ended_is_told_no(sides: tuple[Side, Side]) -> None:
    p, d = sides
    p.prefill(OURS, TOKENS, BLOCKS)
    p.worker._reqs_to_send[OURS] = time.perf_counter() - 1
    until(lambda: p.sent, p)
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    assert not over(d, THEIRS, p)
    assert not p.worker._pending_d_registrations


def test_what_comes_after_another_has_called_the_request_off_is_told_no(sides: tuple[Side, Side]) -> None:
    p, d = sides
    request = d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    abort(d, request)
    until(lambda: THEIRS in d.received | d.failed, p, d)
    again = THEIRS.replace("2", "3")
    d.load(again, TOKENS, [10, 11, 12], ticket(p))
    assert not over(d, again, p)


def test_a_decode_servers_heartbeat_renews_the_lease(sides: tuple[Side, Side]) -> None:
    p, d = sides
    p.prefill(OURS, TOKENS, BLOCKS)
    until(lambda: OURS in p.worker._reqs_to_send, p)
    before = p.worker._reqs_to_send[OURS] = time.perf_counter() + 1
    # Not registered yet: it waits for room.
    d.scheduler.on_new_request(request_of(THEIRS, TOKENS, ticket(p, remote_request_id="a")))
    d.scheduler._heartbeat_interval = 0
    until(lambda: p.worker._reqs_to_send.get(OURS, 0.0) > before, p, d)


def test_a_push_that_is_being_posted_is_not_called_off(sides: tuple[Side, Side]) -> None:
    """Its writes are known to nobody until all are posted."""
    p, d = sides
    held = Held(p)
    swallow_completions(d)
    posted, go, stock = threading.Event(), threading.Event(), p.worker._xfer_blocks

    def post(*args: Any, **more: Any) -> Any:
        handle = stock(*args, **more)
        posted.set()
        assert go.wait(60)
        return handle

    p.worker._xfer_blocks = post
    request = d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    until(posted.is_set, p, d)
    p.step()
    go.set()
    abort(d, request)
    told = d.worker._unanswered[THEIRS]
    # P says that it is at it, and D waits on, for as long as for a push.
    until(lambda: d.worker._unanswered[THEIRS] > told + 60, p, d)
    assert not d.received | d.failed
    held.still = False
    until(lambda: p.sent == {OURS}, p, d)
    # What it says then, asked again, is that it is done.
    until(lambda: THEIRS in d.received, p, d)


def test_a_push_that_waits_for_a_handshake_can_be_called_off(sides: tuple[Side, Side]) -> None:
    p, d = sides
    begun, go = slow_handshakes(p)
    request = d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    until(begun.is_set, p, d)
    before = d.block(TAKEN[0]).clone()
    abort(d, request)
    until(lambda: p.worker._cancelled_at, p, d)
    go.set()
    until(lambda: THEIRS in d.received | d.failed and p.sent == {OURS}, p, d)
    assert torch.equal(d.block(TAKEN[0]), before)
    assert not p.worker._writes


def test_a_push_whose_handshake_fails_is_tried_again(sides: tuple[Side, Side]) -> None:
    p, d = sides
    stock, failures = p.worker._nixl_handshake, iter([TimeoutError("no network")])

    def shake(*args: Any) -> Any:
        for failure in failures:
            raise failure
        return stock(*args)

    p.worker._nixl_handshake = shake
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    assert over(d, THEIRS, p)


def test_a_completion_that_was_lost_is_said_again(sides: tuple[Side, Side]) -> None:
    """As when it comes to a rank that does not know the request yet."""
    p, d = sides
    swallow_completions(d)
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    assert over(d, THEIRS, p)
    assert torch.equal(d.block(TAKEN[0]), p.block(BLOCKS[0]))


def test_a_no_that_was_lost_is_said_again(sides: tuple[Side, Side]) -> None:
    p, d = sides

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no network")

    p.worker._peers.transfer = fail
    stock, lost = d.worker._pending_completion_notifs.put, iter([True])
    d.worker._pending_completion_notifs.put = lambda notice, *more: next(lost, False) or stock(notice, *more)
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    p.prefill(OURS, TOKENS, BLOCKS)
    assert not over(d, THEIRS, p)


def test_who_did_not_look_gives_nobody_up(sides: tuple[Side, Side]) -> None:
    """The answer has lain here while this process did something else."""
    p, d = sides
    request = d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    begun, go = slow_handshakes(p)
    abort(d, request)
    until(begun.is_set, p)
    d.worker._looked_at -= 100
    d.worker._unanswered[THEIRS] -= 100
    d.step()
    d.step()
    assert not d.received | d.failed
    go.set()
    assert over(d, THEIRS, p)


def test_a_registration_that_outlived_its_request_is_not_sent(sides: tuple[Side, Side]) -> None:
    p, d = sides
    begun, go = slow_handshakes(d)
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(begun.is_set, d)
    d.worker._failed_recv_reqs.put(THEIRS)
    assert not over(d, THEIRS)
    go.set()
    again = THEIRS.replace("2", "3")
    d.load(again, TOKENS, [10, 11, 12], ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    assert list(p.worker._pending_d_registrations) == [again]
    assert d.worker._registered == {again}


def test_a_registration_that_the_network_has_held_back_is_asked_for_again(sides: tuple[Side, Side]) -> None:
    p, d = sides
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    (registration,) = p.worker._pending_d_registrations.values()
    assert not p.worker._was_long_on_its_way(registration)
    late = {**registration, "sent_at": registration["sent_at"] - 2 * STALL_SECONDS}
    assert p.worker._was_long_on_its_way(late)


def test_what_failed_leaves_nothing_to_call_off(sides: tuple[Side, Side]) -> None:
    p, d = sides
    p.prefill(OURS, TOKENS, BLOCKS)
    d.load(THEIRS, list(range(100, 170)), TAKEN, ticket(p))
    assert not over(d, THEIRS, p)
    d.step()
    assert d.worker._cancellations == d.worker._unanswered == {}
    again = THEIRS.replace("2", "3")
    d.load(again, TOKENS, [10, 11, 12], ticket(p))
    assert over(d, again, p)


@pytest.mark.parametrize(
    "wrong", [{"decode_engine_id": None}, {"decode_port": "x"}, {"local_block_ids": 3}, {"prompt": 5}], ids=str
)
def test_a_registration_that_is_none_is_dropped(sides: tuple[Side, Side], wrong: dict[str, Any]) -> None:
    p, d = sides
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    (good,) = p.worker._pending_d_registrations.values()
    known = list(p.worker._pending_d_registrations)
    sent = {**good, "request_id": "cmpl-b-0-22222222", "notice": b"x", **wrong}
    p.worker._handle_push_reg_notif(PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(sent))
    assert list(p.worker._pending_d_registrations) == known
    p.worker._handle_push_reg_notif(
        PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode({**sent, **{name: good[name] for name in wrong}})
    )
    assert "notice" not in p.worker._pending_d_registrations["cmpl-b-0-22222222"]


def test_no_is_said_when_all_writes_of_a_request_are_over(sides: tuple[Side, Side]) -> None:
    p, _ = sides
    worker, states = p.worker, {"one": "ERR", "other": "PROC"}
    worker._peers.check_xfer_state = states.__getitem__
    worker._peers.release_xfer_handle = lambda _: None
    worker._peers.get_xfer_telemetry = lambda _: None
    worker.xfer_stats.record_transfer = lambda _: None
    said: list[Any] = []
    worker._deferred_push_inbox.put = said.append
    worker._writes[OURS] = {"request_id": THEIRS}
    worker._sending_transfers[OURS] = ["one", "other"]
    p.step()
    assert said == []
    states["other"] = "DONE"
    p.step()
    assert [read(each["notice"]) for _, _, each in said] == [No(THEIRS, 1, "0.0")]


def test_what_is_awaited_from_a_lost_peer_can_still_come(sides: tuple[Side, Side]) -> None:
    p, d = sides
    d.load(THEIRS, TOKENS, TAKEN, ticket(p))
    until(lambda: p.worker._pending_d_registrations, p, d)
    begun, go = slow_handshakes(d)
    lose(d, p)
    until(begun.is_set, p, d)
    assert p.worker.engine_id not in d.worker._remote_agents
    p.prefill(OURS, TOKENS, BLOCKS)
    assert over(d, THEIRS, p)
    go.set()


@pytest.mark.parametrize("sides", ["read"], indirect=True)
def test_a_peer_that_is_lost_while_it_is_asked_is_forgotten_after_its_answer(sides: tuple[Side, Side]) -> None:
    p, d = sides
    go, stock = threading.Event(), d.worker._asker.problem
    d.worker._asker.problem = lambda *claim: stock(*claim) if go.wait(60) else "nobody let it go on"
    d.load(THEIRS, TOKENS, TAKEN, p.prefill(OURS, TOKENS, BLOCKS))
    until(lambda: d.worker._answers, p, d)
    lose(d, p)
    d.step()
    go.set()
    assert over(d, THEIRS, p)
    until(lambda: p.worker.engine_id not in d.worker._remote_agents, p, d)
