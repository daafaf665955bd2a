"""Both sides of Baton's connectors in one process, over real NIXL and without a model: what is moved, and what not."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

import torch

from tests.engine.sides import BLOCKS, OTHERS, SECONDS, TOKENS, Side, is_write, over, until

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(params=["read", "write"])
def sides(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Side, Side]]:
    made = tuple(
        Side(f"{name}-{time.monotonic_ns()}", request.param, monkeypatch, push_registration_timeout=2) for name in "pd"
    )
    yield made  # type: ignore[misc]
    for side in made:
        side.close()


def test_a_hand_off_moves_the_blocks_and_frees_them(sides: tuple[Side, Side]) -> None:
    p, d = sides
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    d.load("cmpl-a-0-22222222", TOKENS, [7, 8, 9], ticket)
    assert over(d, "cmpl-a-0-22222222", p)
    for ours, theirs in ((7, 3), (8, 5), (9, 4)):
        assert torch.equal(d.block(ours), p.block(theirs))
    until(lambda: p.sent == {"cmpl-a-0-11111111"}, p, d)
    assert p.scheduler._pinned == d.scheduler._receiving == set()


def test_another_prompts_ticket_brings_nothing(sides: tuple[Side, Side]) -> None:
    p, d = sides
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    d.load("cmpl-a-0-22222222", OTHERS, [7, 8, 9], ticket)
    assert not over(d, "cmpl-a-0-22222222", p)
    # Whose it is can still use it.
    d.load("cmpl-a-0-33333333", TOKENS, [10, 11, 12], ticket)
    assert over(d, "cmpl-a-0-33333333", p)
    assert torch.equal(d.block(10), p.block(3))


def test_a_used_ticket_brings_nothing(sides: tuple[Side, Side]) -> None:
    p, d = sides
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    d.load("cmpl-a-0-22222222", TOKENS, [7, 8, 9], ticket)
    assert over(d, "cmpl-a-0-22222222", p)
    until(lambda: bool(p.sent), p, d)
    d.load("cmpl-a-0-33333333", TOKENS, [10, 11, 12], ticket)
    assert not over(d, "cmpl-a-0-33333333", p)


def test_a_peer_that_never_has_the_request_is_not_waited_for(sides: tuple[Side, Side]) -> None:
    p, d = sides
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    d.load("cmpl-b-0-22222222", TOKENS, [7, 8, 9], {**ticket, "remote_request_id": "cmpl-b-0-11111111"})
    assert not over(d, "cmpl-b-0-22222222", p)


@pytest.mark.parametrize("wrong", [{"remote_port": 9}, {"tp_size": 2}, {"remote_engine_id": "nobody"}], ids=str)
def test_a_failed_handshake_fails_its_request_and_spoils_nothing(sides: tuple[Side, Side], wrong: Any) -> None:
    p, d = sides
    d.worker._patience = SECONDS
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    d.load("cmpl-b-0-22222222", TOKENS, [7, 8, 9], {**ticket, **wrong})
    assert not over(d, "cmpl-b-0-22222222", p)
    d.load("cmpl-a-0-33333333", TOKENS, [10, 11, 12], ticket)
    assert over(d, "cmpl-a-0-33333333", p)


def test_blocks_that_cannot_be_fail_their_request(sides: tuple[Side, Side]) -> None:
    p, d = sides
    if is_write(p):
        pytest.skip("in write mode no ticket names blocks")
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    for number, blocks in enumerate(([[3, 5, BLOCKS]], [[3, 5, 1 << 30]], [[3, 3, 3]], [[3, 5, 4], [1]], [[4, 5, 3]])):
        name = f"cmpl-a-0-{number:08}"
        try:
            d.load(name, TOKENS, [7, 8, 9], {**ticket, "remote_block_ids": blocks})
        except AssertionError:
            continue  # computed here
        assert not over(d, name, p)


def test_a_peer_that_is_gone_fails_the_request(sides: tuple[Side, Side]) -> None:
    p, d = sides
    ticket = p.prefill("cmpl-a-0-11111111", TOKENS, [3, 5, 4])
    p.scheduler.shutdown()
    d.load("cmpl-a-0-22222222", TOKENS, [7, 8, 9], ticket)
    assert not over(d, "cmpl-a-0-22222222")
