"""Write mode when an engine fails: both legs start again together, and no attempt is taken for another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Role
from tests.proxy.fakes import FakeEngine, House, hang, until
from tests.proxy.push_fakes import TOKENS, Pushing
from tests.proxy.test_failover import QUICK, cut, cut_after_head, generation_fails, metrics, refusing
from tests.proxy.test_write import ask, pushing, text_of

P, D = Role.PREFILL, Role.DECODE
TEXT = "".join(TOKENS)
FAULTS = [
    pytest.param(refusing(500), id="500"),
    pytest.param(refusing(503), id="503"),
    pytest.param(cut, id="cut"),
    pytest.param(cut_after_head, id="cut-after-head"),
    pytest.param(generation_fails, id="generation-fails"),
]


def with_spares(test: Callable[[House, Pushing], Awaitable[None]], **options: Any) -> None:
    """Run *test* in a house of two engines a role; in the end nobody waits for anybody and no ticket is out."""

    async def go(made: House, push: Pushing) -> None:
        await test(made, push)
        await until(lambda: push.fabric.clean)
        tickets = made.proxy.way.outstanding
        await until(lambda: not any(tickets.count(each.id) for each in made.proxy.fleet.pools[P]))

    pushing(go, **{"prefill": 2, "decode": 2, "probe_interval_seconds": 600.0, "retries": QUICK, **options})


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_prefill_server_that_fails_is_followed_by_another(fault: Any, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        made.prefill[0].answer = fault
        status, raw = await ask(made, {"prompt": "a", "stream": streamed})
        assert (status, text_of(raw)) == (200, TEXT)
        assert [len(each.bodies) for each in made.prefill] == [1, 1]
        # the decode server waits for the right one, under an id that the first attempt did not have
        last = made.decode[0].bodies[-1]["kv_transfer_params"]
        assert last["remote_engine_id"] == "e1"
        ids = {headers["x-request-id"] for headers in made.decode[0].headers}
        assert len(ids) == len(made.decode[0].headers)
        assert (await metrics(made))["baton_failovers_total"] == 1

    with_spares(test)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_decode_server_that_fails_is_followed_by_another_and_the_prompt_is_computed_again(
    fault: Any, streamed: bool
) -> None:
    async def test(made: House, push: Pushing) -> None:
        async def when_prefill_is_free(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            # what fails after prefill has pushed must have taken what was pushed
            if fault is generation_fails:
                push.free[P].set()
                params = body["kv_transfer_params"]
                await push.fabric.register(params["remote_engine_id"], f"cmpl-{request.headers['x-request-id']}-0")
            answered: web.StreamResponse = await fault(engine, request, body)
            return answered

        push.free[P].clear()
        made.decode[0].answer = when_prefill_is_free
        asking = asyncio.ensure_future(ask(made, {"prompt": "a", "stream": streamed}))
        await until(lambda: made.decode[1].bodies != [])
        push.free[P].set()
        status, raw = await asking
        assert (status, text_of(raw)) == (200, TEXT)
        assert sum(len(each.bodies) for each in made.prefill) == 2
        ids = [each.headers[0]["x-request-id"] for each in made.decode]
        assert ids[1] == f"{ids[0]}~1"
        assert (await metrics(made))["baton_failovers_total"] == 1

    with_spares(test)


@pytest.mark.parametrize("unreachable", [P, D])
def test_a_server_that_cannot_be_reached_is_passed_over(unreachable: Role) -> None:
    async def test(made: House, push: Pushing) -> None:
        dead = (made.prefill if unreachable is P else made.decode)[0]
        assert dead.server is not None
        await dead.server.close()
        for _ in range(3):
            status, raw = await ask(made)
            assert (status, text_of(raw)) == (200, TEXT)

    with_spares(test)


def test_a_ticket_of_a_prefill_that_was_done_before_decode_could_not_be_reached_is_given_back() -> None:
    async def test(made: House, push: Pushing) -> None:
        from baton.http import ConnectFailed

        pool = made.proxy.way.upstream._pools["D0"]

        async def unreachable() -> Any:
            await until(lambda: made.proxy.way.outstanding.count("P0") == 1)
            raise ConnectFailed("no connection")

        pool.connect = unreachable  # type: ignore[method-assign]
        pool.take = lambda: None  # type: ignore[method-assign]
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)
        await until(lambda: len(push.fabric.pushed) == 2)
        assert made.proxy.way.outstanding.dropped["P0"] == 1

    with_spares(test)


@pytest.mark.parametrize("status", [400, 404])
@pytest.mark.parametrize("role", [P, D])
def test_a_clients_own_mistake_is_told_at_once(role: Role, status: int) -> None:
    async def test(made: House, push: Pushing) -> None:
        push.free[P].clear()
        for engine in made.prefill if role is P else made.decode:
            engine.answer = refusing(status)
        assert (await ask(made))[0] == status
        assert sum(len(each.bodies) for each in made.prefill) == 1
        assert sum(len(each.bodies) for each in made.decode) == 1

    with_spares(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_have_a_new_id_in_their_bodies_too(streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        made.prefill[0].answer = refusing(500)
        status, _ = await ask(made, {"input": "a", "stream": streamed}, path="/v1/responses")
        assert status == 200
        ids = [each.bodies[0]["request_id"] for each in made.prefill]
        assert len(set(ids)) == 2
        assert made.decode[0].bodies[-1]["request_id"] == ids[1]
        assert made.decode[0].raws[-1].count(b'"request_id"') == 1

    with_spares(test)


@pytest.mark.parametrize("role", [P, D])
def test_a_part_that_an_engine_fails_is_tried_again_by_itself(role: Role) -> None:
    async def test(made: House, push: Pushing) -> None:
        (made.prefill if role is P else made.decode)[0].answer = cut
        status, raw = await ask(made, {"prompt": ["a", "b"]})
        assert status == 200
        assert raw.count(TEXT.encode()) == 2
        # what prefill had finished for the decode server that broke waits for its lease
        push.fabric.finished.clear()

    with_spares(test)


@pytest.mark.parametrize("role", [P, D])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_leaves_in_the_second_attempt_closes_both_legs(role: Role, streamed: bool) -> None:
    async def test(made: House, push: Pushing) -> None:
        (made.prefill if role is P else made.decode)[0].answer = refusing(500)
        push.free[P].clear()
        made.decode[1].answer = hang if role is P else made.decode[1].answer
        asking = asyncio.ensure_future(made.post({"prompt": "a", "stream": streamed}).__aenter__())
        await until(lambda: made.prefill[1].bodies != [])
        asking.cancel()
        await until(lambda: made.prefill[1].gone == 1)

    with_spares(test)
