"""Conversations when an engine fails: the answer comes all the same, and no turn is used twice."""

from __future__ import annotations

import pytest

from baton.cluster import Role
from tests.proxy.conversations import COMPLETIONS, Bidirectional, Talk
from tests.proxy.fakes import until
from tests.proxy.test_failover import cut, cut_after_head, refusing
from tests.proxy.test_turns import talking

OPTIONS = {"prefill": 2, "decode": 2, "probe_interval_seconds": 600.0}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("role", list(Role))
def test_a_turn_whose_engine_fails_is_computed_by_another_and_leaves_the_next_its_own(
    role: Role, streamed: bool
) -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made, COMPLETIONS, streamed)
        await talk.say()
        # the second request goes to the second of each
        failing = (engines.made.prefill if role is Role.PREFILL else engines.made.decode)[1]
        usual, failing.answer = failing.answer, cut_after_head if role is Role.DECODE else cut
        await talk.say()
        failing.answer = usual
        await talk.say()
        # each turn was good for one prefill leg at most, and the third found what the second had left
        assert engines.pulled[-1] == "".join(talk.history[:4])
        store = engines.store
        assert store.kept == 3 and store.kept == store.used + store.dropped.total() + len(store)
        await until(lambda: not any(engines.made.proxy.way.outstanding.count(place) for place in ("P0", "P1")))

    talking(test, **OPTIONS)


def test_a_turn_that_a_prefill_server_took_is_not_sent_to_another() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        for engine in engines.made.prefill:
            engine.answer = refusing(500)
        await talk.say(status=500)
        legs = [body["kv_transfer_params"] for each in engines.made.prefill for body in each.bodies]
        assert sum(bool(leg["remote_block_ids"]) for leg in legs) == 1
        assert engines.store.used == 1

    talking(test, **OPTIONS)
