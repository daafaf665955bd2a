"""Turns by themselves: each once, for its owner, while it lasts."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from baton.cluster import Endpoint, Role
from baton.proxy import turns
from baton.proxy.client_tickets import Signer
from baton.proxy.fleet import ProxyInstance
from baton.proxy.turns import Kept, Turn, TurnStore, Why
from tests.proxy.conversations import Clock

ME, YOU = (b"me", "m"), (b"you", "m")
PARAMS = {
    "do_remote_decode": True,
    "remote_block_ids": [[1]],
    "remote_engine_id": "d",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> TurnStore:
    return TurnStore(ttl_seconds=10.0, most=3, clock=clock)


@pytest.fixture
def d0() -> ProxyInstance:
    return ProxyInstance(Endpoint(role=Role.DECODE, host="h", port=1), "D0", 0, usable=True)


def keep(store: TurnStore, holder: ProxyInstance, conversation: bytes, owner: Any = ME, **params: Any) -> None:
    turn = Turn(store, owner, conversation)
    turn.sent_to(holder)
    turn.found({**PARAMS, **params})
    turn.keep()


def adds_up(store: TurnStore) -> bool:
    return store.kept == store.used + store.dropped.total() + len(store)


def test_a_turn_is_good_once(store: TurnStore, d0: ProxyInstance) -> None:
    keep(store, d0, b"c")
    taken = store.take(ME, b"c")
    assert isinstance(taken, Kept) and taken.params == PARAMS
    assert store.take(ME, b"c") is Why.NONE
    assert (store.kept, store.used, len(store)) == (1, 1, 0)


@pytest.mark.parametrize("other", [(b"you", "m"), (b"me", "another model"), (b"", "m")])
def test_a_turn_is_its_owners_alone(store: TurnStore, d0: ProxyInstance, other: Any) -> None:
    keep(store, d0, b"c")
    assert store.take(other, b"c") is Why.NONE
    number = next(iter(store._turns))
    assert store.take_by_id(other, number) is Why.FOREIGN
    assert isinstance(store.take_by_id(ME, number), Kept)
    assert store.take(ME, b"c") is Why.NONE


def test_a_turn_expires_and_is_told_from_none_for_as_long_again(
    store: TurnStore, d0: ProxyInstance, clock: Clock
) -> None:
    for name in (b"a", b"b", b"c"):
        keep(store, d0, name)
    clock.now += 9.9
    assert isinstance(store.take(ME, b"a"), Kept)
    clock.now += 0.1
    assert store.take(ME, b"b") is Why.EXPIRED
    clock.now += 10.0
    store.sweep()
    assert store.take(ME, b"c") is Why.NONE
    assert store.dropped == {Why.EXPIRED: 2} and adds_up(store)


def test_a_newer_turn_of_a_conversation_takes_the_place_of_the_older(store: TurnStore, d0: ProxyInstance) -> None:
    keep(store, d0, b"c", remote_block_ids=[[1]])
    keep(store, d0, b"c", remote_block_ids=[[2]])
    assert len(store) == 1 and store.dropped == {Why.REPLACED: 1}
    taken = store.take(ME, b"c")
    assert isinstance(taken, Kept) and taken.params["remote_block_ids"] == [[2]]
    assert adds_up(store)


def test_the_least_recently_kept_goes_first(store: TurnStore, d0: ProxyInstance) -> None:
    for name in (b"a", b"b", b"c"):
        keep(store, d0, name)
    keep(store, d0, b"a")
    keep(store, d0, b"d")
    assert store.take(ME, b"b") is Why.NONE
    assert all(isinstance(store.take(ME, name), Kept) for name in (b"a", b"c", b"d"))
    assert store.dropped == {Why.REPLACED: 1, Why.EVICTED: 1} and adds_up(store)


def test_many_conversations_leave_nothing_beyond_the_bound(store: TurnStore, d0: ProxyInstance) -> None:
    for number in range(10_000):
        keep(store, d0, b"%d" % number)
    assert len(store._turns) == len(store._newest) == 3
    assert adds_up(store)


def test_a_turn_of_a_decode_server_that_is_out_is_not_used(store: TurnStore, d0: ProxyInstance) -> None:
    keep(store, d0, b"c")
    d0.set_usable(False, "test")
    assert store.take(ME, b"c") is Why.DECODE_GONE
    assert store.dropped == {Why.DECODE_GONE: 1} and adds_up(store)


def test_a_decode_server_that_was_out_since_may_be_another(store: TurnStore, d0: ProxyInstance) -> None:
    keep(store, d0, b"c")
    d0.set_usable(False, "test")
    d0.set_usable(True, "test")
    assert store.take(ME, b"c") is Why.ENGINE_RESTARTED
    keep(store, d0, b"c")
    assert isinstance(store.take(ME, b"c"), Kept)


@pytest.mark.parametrize(("now", "good"), [("d", True), ("e", False), (None, False)])
@pytest.mark.parametrize("given", ["d", "d_dp1"])
def test_where_the_engine_id_is_known_it_decides(
    store: TurnStore, d0: ProxyInstance, monkeypatch: pytest.MonkeyPatch, now: str | None, given: str, good: bool
) -> None:
    keep(store, d0, b"c", remote_engine_id=given)
    d0.set_usable(False, "test")
    d0.set_usable(True, "test")
    monkeypatch.setattr(turns, "known_engine_id", lambda _: now)
    found = store.take(ME, b"c")
    assert isinstance(found, Kept) if good else found is Why.ENGINE_RESTARTED


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        "ticket",
        {},
        {**PARAMS, "do_remote_decode": False},
        *({key: value for key, value in PARAMS.items() if key != name} for name in PARAMS),
        *({**PARAMS, name: None} for name in PARAMS),
        {**PARAMS, "remote_block_ids": []},
    ],
)
def test_what_is_no_whole_ticket_is_not_kept(store: TurnStore, d0: ProxyInstance, params: Any) -> None:
    turn = Turn(store, ME, b"c")
    turn.sent_to(d0)
    turn.found(params)
    turn.keep()
    assert len(store) == 0


def test_an_answer_that_was_held_back_expires_from_when_that_began(
    store: TurnStore, d0: ProxyInstance, clock: Clock
) -> None:
    turn = Turn(store, ME, b"c")
    turn.sent_to(d0)
    turn.held_back()
    clock.now += 9.0
    turn.held_back()
    turn.found(PARAMS)
    turn.keep()
    clock.now += 1.0
    assert store.take(ME, b"c") is Why.EXPIRED


def test_an_answer_without_its_end_is_not_kept_and_one_with_two_is_kept_once(
    store: TurnStore, d0: ProxyInstance
) -> None:
    turn = Turn(store, ME, b"c")
    turn.sent_to(d0)
    turn.found(PARAMS)
    assert len(store) == 0
    turn.keep()
    turn.keep()
    assert (store.kept, len(store)) == (1, 1)


def test_a_clients_ticket_says_an_id_and_a_time_and_nothing_else() -> None:
    signer, number = Signer(), bytes(range(16))
    text = signer.sign(number, 12.5)
    assert signer.read(text) == (number, 12.5)
    assert len(base64.urlsafe_b64decode(text)) == 16 + 8 + 32


def test_a_clients_ticket_of_another_start_or_with_any_bit_changed_is_forged() -> None:
    signer = Signer()
    text = signer.sign(bytes(16), 12.5)
    assert Signer().read(text) is None
    raw = base64.urlsafe_b64decode(text)
    for bit in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert signer.read(base64.urlsafe_b64encode(changed).decode()) is None


@pytest.mark.parametrize("text", [None, 5, True, {}, [], "", "x", "x" * 76, "\u00e9" * 76, "=" * 76, "x" * 1_000_000])
def test_what_is_no_ticket_at_all_is_no_error(text: Any) -> None:
    assert Signer().read(text) is None
