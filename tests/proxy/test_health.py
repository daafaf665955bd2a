"""Who is given requests when engines die, hang or fail: over real sockets to fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Endpoint, Role
from baton.proxy import Patience, Retries
from baton.proxy.breaker import BreakerRules
from baton.proxy.fleet import InstanceState, ProxyInstance
from tests.proxy.fakes import FakeEngine, House, decode_answer, hang, prefill_answer, stream, until, with_house

P, D = Role.PREFILL, Role.DECODE
QUICK = BreakerRules(failures=3, successes=2, open_seconds=1.5)


async def status(made: House, **body: Any) -> int:
    async with made.post({"prompt": "a", **body}) as response:
        await response.read()
        return int(response.status)


def instances(made: House, role: Role) -> list[ProxyInstance]:
    return made.proxy.fleet.pools[role]


async def refuse(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "your mistake"}}, status=400)


async def fail(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"message": "broken"}}, status=500)


@contextlib.asynccontextmanager
async def mute() -> AsyncIterator[tuple[int, list[float]]]:
    """A server that takes connections and never says a word; its port, and when each connection came."""
    came: list[float] = []
    held: list[asyncio.StreamWriter] = []

    async def on_connection(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(time.monotonic())
        held.append(writer)

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], came
    finally:
        server.close()
        for writer in held:
            writer.close()


@pytest.mark.parametrize("role", [P, D])
def test_one_of_two_dies_under_load_and_comes_back_and_few_notice(role: Role) -> None:
    async def test(made: House) -> None:
        victim = made.prefill[1] if role is P else made.decode[1]
        instance = instances(made, role)[1]
        seen: list[int] = []
        stop = False

        async def client() -> None:
            while not stop:
                seen.append(await status(made))

        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(client())
            await until(lambda: len(seen) > 40)
            assert set(seen) == {200}
            assert victim.server is not None and victim.server.port is not None
            port = victim.server.port
            await victim.server.close()
            await until(lambda: not instance.usable)
            after = len(seen) + 4
            await until(lambda: len(seen) > after + 60)
            assert set(seen[after:]) == {200}
            # at most what was under way on it, and what was just being sent
            assert len(seen) - seen.count(200) <= 8
            served = len(victim.bodies)
            await victim.start_on(port)
            await until(lambda: len(victim.bodies) > served + 10)
            stop = True
        assert instance.usable
        assert victim.server is not None
        await victim.server.close()

    with_house(test, prefill=2, decode=2, probe_interval_seconds=0.1)


@pytest.mark.parametrize("code", [400, 404, 422, 429])
def test_a_storm_of_refusals_takes_nobody_out(code: int) -> None:
    async def test(made: House) -> None:
        async def refusal(*_: Any) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no"}}, status=code)

        for engine in (*made.prefill, *made.decode):
            engine.answer = refusal
        assert {await status(made) for _ in range(20)} == {code}
        for engine in made.prefill:
            engine.answer = None
        assert {await status(made) for _ in range(20)} == {code}
        for instance in made.proxy.fleet:
            assert instance.usable
            assert not instance.breaker.failures
            assert instance.last_error == ""

    with_house(test, prefill=2, decode=2, breaker=QUICK)


@pytest.mark.parametrize("role", [P, D])
def test_an_engine_that_fails_what_it_is_asked_is_out_and_comes_back_by_trials(role: Role) -> None:
    async def test(made: House) -> None:
        sick = (made.prefill if role is P else made.decode)[1]
        instance = instances(made, role)[1]
        sick.answer = fail
        for _ in range(12):
            await status(made)
        assert len(sick.bodies) == 3
        assert instance.state() is InstanceState.OPEN
        assert instance.last_error == "a request was answered 500"
        assert instance.ejections == {"failures": 1}
        # it is still good at /health: only a trial can tell, and there is one at a time
        await until(lambda: instance.state() is InstanceState.HALF_OPEN)
        asked = len(sick.bodies)
        for _ in range(6):
            await status(made)
        assert len(sick.bodies) == asked + 1
        sick.answer = None
        await until(lambda: instance.state() is InstanceState.HALF_OPEN)
        assert {await status(made) for _ in range(20)} == {200}
        assert instance.state() is InstanceState.USABLE
        assert len(sick.bodies) > asked + 2

    with_house(test, prefill=2, decode=2, breaker=QUICK)


async def asides(made: House) -> list[int]:
    """The statuses of what reaches decode servers and generates nothing."""
    got = [(await made.get("/v1/models"))[0]]
    async with made.post({"prompt": "a"}, "/tokenize") as response:
        got.append(response.status)
    await made.proxy.way.transfers.scrape(made.proxy.fleet, made.proxy.way.upstream, [])
    return got


def test_what_generates_nothing_says_nothing_of_an_engine_that_cannot_generate() -> None:
    async def test(made: House) -> None:
        sick, (instance,) = made.decode[0], instances(made, D)
        sick.metrics = lambda: ""
        sick.answer = fail
        for _ in range(3):
            assert await status(made) == 500
            assert await asides(made) == ([200, 200] if instance.usable else [503, 503])
        assert instance.state() is InstanceState.OPEN
        await until(lambda: instance.state() is InstanceState.HALF_OPEN)
        # They neither close it nor take the trial
        for _ in range(3):
            assert await asides(made) == [200, 200]
        assert instance.state() is InstanceState.HALF_OPEN
        begun, release = asyncio.Event(), asyncio.Event()

        async def wait(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            begun.set()
            await release.wait()
            return await decode_answer(engine, request, body)

        sick.answer = wait
        trial = asyncio.create_task(status(made))
        await begun.wait()
        # nor end it.
        async with made.proxy.way.upstream.get(instance, b"/v1/models", []) as response:
            await response.read()
            assert response.status == 200
        assert await status(made) == 503
        release.set()
        assert await trial == 200

    with_house(test, breaker=BreakerRules(failures=3, successes=2, open_seconds=1.5), retries=Retries(most=0))


def half_open(made: House, role: Role) -> ProxyInstance:
    """The first of *role*, due a trial; one that is begun and not ended lasts as long as a test."""
    (instance, *_) = instances(made, role)
    instance.breaker.trip(time.monotonic(), "broken")
    instance.breaker.since -= LONG.open_seconds
    instance.leg_good()
    assert instance.state() is InstanceState.HALF_OPEN and not instance.usable
    return instance


LONG = BreakerRules(open_seconds=600.0, successes=3)
SAID = {"engine_id": "e", "transfer_mode": "pull", "side_channel_host": "h", "side_channel_port": 5, "dp_size": 1}


async def names_no_rank(made: House) -> None:
    async with made.post({"prompt": "a"}, headers={"X-data-parallel-rank": "9"}) as response:
        assert response.status == 400


async def is_refused_by_prefill(made: House) -> None:
    made.prefill[0].answer = refuse
    assert await status(made) == 400
    # Of several parts one is the trial, and another may find nobody.
    assert await status(made, prompt=["a", "b"], n=2) in (400, 503)
    made.prefill[0].answer = None


async def fails_in_prefill(made: House) -> None:
    made.prefill[0].answer = fail
    assert await status(made) == 500
    made.prefill[0].answer = None


async def leaves_in_prefill(made: House) -> None:
    made.prefill[0].answer = hang
    asked = len(made.prefill[0].bodies)
    asking = asyncio.create_task(status(made))
    await until(lambda: len(made.prefill[0].bodies) > asked)
    asking.cancel()
    await until(lambda: not made.proxy._open)
    made.prefill[0].answer = None


async def generates_nothing(made: House) -> None:
    assert await status(made, echo=True, max_tokens=0) == 200


IN_VAIN = [names_no_rank, is_refused_by_prefill, fails_in_prefill, leaves_in_prefill, generates_nothing]


@pytest.mark.parametrize(
    ("half", "request_that"),
    [("prefill", names_no_rank), *((half, each) for half in ("decode", "pair") for each in IN_VAIN)],
)
def test_a_request_that_never_comes_to_what_is_half_open_is_no_trial_of_it(half: str, request_that: Any) -> None:
    async def test(made: House) -> None:
        (prefill,), (decode,) = instances(made, P), instances(made, D)
        if half == "pair":
            for _ in range(3):
                made.proxy.fleet.pairs.fail("P0", "D0", time.monotonic(), "500")
            made.proxy.fleet.pairs.bad["P0", "D0"].since -= LONG.open_seconds
        else:
            half_open(made, Role(half))
        await request_that(made)
        await until(lambda: not made.proxy._open)
        now = time.monotonic()
        assert made.proxy.fleet.may_pair(prefill, decode)
        assert all(each.usable or each.admits(now) for each in (prefill, decode))
        assert await status(made) == 200

    with_house(
        test,
        breaker=LONG,
        retries=Retries(most=0),
        prepare=lambda engines: [setattr(each, "about", SAID) for each in engines],
    )


def test_a_request_that_is_tried_again_is_the_same_trial_again() -> None:
    async def test(made: House) -> None:
        decode = half_open(made, D)
        made.prefill[0].answer = fail
        assert await status(made) == 200
        assert len(made.decode[0].bodies) == 1
        assert decode.admits(time.monotonic())

    with_house(test, prefill=2, breaker=LONG)


def test_a_pool_whose_engines_all_fail_is_a_503_that_says_when_to_come_again_and_one_request_is_let_through() -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = fail
        for _ in range(3):
            assert await status(made) == 500
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert "no prefill server is usable (1 known)" in (await response.json())["error"]["message"]
        assert (await made.get("/health"))[0] == 503
        await until(lambda: instances(made, P)[0].state() is InstanceState.HALF_OPEN)
        # who balances over proxies must send something for it to be tried
        assert (await made.get("/health"))[0] == 200
        asked = len(made.prefill[0].bodies)
        release = asyncio.Event()

        async def wait(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = wait
        trial = asyncio.create_task(status(made))
        await until(lambda: len(made.prefill[0].bodies) == asked + 1)
        async with asyncio.timeout(20):
            assert await asyncio.gather(*(status(made) for _ in range(10))) == [503] * 10
        release.set()
        assert await trial == 200
        assert len(made.prefill[0].bodies) == asked + 1

    # longer than the ten take
    with_house(test, breaker=BreakerRules(failures=3, successes=2, open_seconds=2.0))


@pytest.mark.parametrize("size", [(2, 2), (2, 1), (3, 2), (4, 1)])
def test_a_prefill_server_whose_tickets_fail_everywhere_is_out_and_no_decode_server_is(size: tuple[int, int]) -> None:
    async def poisoned(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        numbers = [engine.ledger.give()]
        ticket = {"do_remote_prefill": True, "remote_engine_id": "poison", "remote_block_ids": [numbers]}
        return web.json_response({"choices": [{"text": "x"}], "kv_transfer_params": ticket})

    async def strict(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if body["kv_transfer_params"]["remote_engine_id"] == "poison":
            return await fail(engine, request, body)
        return await decode_answer(engine, request, body)

    async def test(made: House) -> None:
        made.prefill[-1].answer = poisoned
        for engine in made.decode:
            engine.answer = strict
        for _ in range(40):
            await status(made)
        guilty = instances(made, P)[-1]
        assert not guilty.usable
        assert guilty.ejections == {"transfers": 1}
        assert len(made.prefill[-1].bodies) <= 6
        assert {await status(made) for _ in range(20)} == {200}
        for instance in made.proxy.fleet:
            assert instance is guilty or (instance.usable and not instance.ejections.total())

    with_house(test, prefill=size[0], decode=size[1], breaker=BreakerRules(open_seconds=60.0))


def test_with_the_breaker_switched_off_failures_take_nobody_out() -> None:
    async def test(made: House) -> None:
        made.prefill[1].answer = fail
        for _ in range(40):
            await status(made)
        assert len(made.prefill[1].bodies) >= 20
        assert instances(made, P)[1].usable

    with_house(test, prefill=2, breaker=BreakerRules(enabled=False))


def test_one_that_hangs_at_its_first_byte_holds_up_nobody() -> None:
    async def test(made: House) -> None:
        async with mute() as (port, came):
            fleet = made.proxy.fleet
            fleet.add(Endpoint(role=P, host="127.0.0.1", port=port))
            made.proxy._watch.start()
            await until(lambda: len(came) > 0)
            probed = made.prefill[0].probed
            # many rounds of the others' probes within one of its own
            await until(lambda: made.prefill[0].probed > probed + 10)
            assert len(came) == 1
            started = time.monotonic()
            assert {await status(made) for _ in range(20)} == {200}
            assert time.monotonic() - started < 10.0
            assert not instances(made, P)[1].usable
            assert len(came) == 1

    with_house(test, probe_interval_seconds=0.05, probe_timeout_seconds=30.0)


def test_one_that_begins_to_hang_is_out_after_as_many_probes_as_are_asked_for() -> None:
    async def test(made: House) -> None:
        engine, instance = made.prefill[1], instances(made, P)[1]
        await until(lambda: instance.usable)
        failed, ejected = instance.probes_failed, instance.ejections.total()
        engine.health, engine.answer = None, hang
        await until(lambda: not instance.usable)
        assert instance.probes_failed == failed + 2
        assert instance.last_error == "/health failed: too slow"
        assert {await status(made) for _ in range(20)} == {200}
        engine.health, engine.answer = 200, None
        await until(lambda: instance.usable)
        assert instance.ejections["probe"] == ejected + 1

    with_house(test, prefill=2, probe_interval_seconds=0.05, probe_timeout_seconds=0.5)


def test_a_dead_engine_gets_one_request_an_interval_whatever_clients_do() -> None:
    interval = 0.3

    async def test(made: House) -> None:
        engine, instance = made.prefill[1], instances(made, P)[1]
        assert engine.server is not None and engine.server.port is not None
        port = engine.server.port
        await engine.server.close()
        await until(lambda: not instance.usable)
        asked: list[float] = []

        async def slam(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            asked.append(time.monotonic())
            writer.close()

        async with await asyncio.start_server(slam, "127.0.0.1", port):
            began = time.monotonic()
            seen: list[int] = []
            while time.monotonic() - began < 6 * interval:
                seen.append(await status(made))
        assert set(seen) == {200}
        assert 1 <= len(asked) <= 7
        assert all(later - sooner > interval * 0.9 for sooner, later in itertools.pairwise(asked))

    with_house(test, prefill=2, probe_interval_seconds=interval)


def test_another_path_may_say_how_an_engine_is() -> None:
    async def test(made: House) -> None:
        assert (await made.get("/health"))[0] == 200
        assert made.prefill[0].probed == 0

    with_house(test, probe_path="/v1/models")


@pytest.mark.parametrize("code", [500, 503])
def test_an_engine_that_says_it_is_ill_is_out_after_two_probes(code: int) -> None:
    async def test(made: House) -> None:
        engine, instance = made.decode[0], instances(made, D)[0]
        engine.health = code
        await until(lambda: not instance.usable)
        assert instance.last_error == f"/health answered {code}"
        assert instance.probes_failed == 2
        engine.health = 200
        await until(lambda: instance.usable)

    with_house(test, probe_interval_seconds=0.05)


def test_probes_and_changes_of_the_fleet_leave_what_is_in_flight_alone() -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request, [b'data: {"choices": [{"text": "a"}]}\n\n'])
            await release.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        for engine in made.decode:
            engine.answer = slow
        streams = [asyncio.create_task(status(made, stream=True)) for _ in range(10)]
        pool = instances(made, D)
        await until(lambda: [each.in_flight for each in pool] == [5, 5])
        for turn in range(5):
            await made.proxy.way.upstream.probe(made.proxy.fleet)
            new, _ = await made.proxy.members.add(Endpoint(role=D, host="127.0.0.1", port=1 + turn))
            await made.proxy.members.remove(new.id)
            assert [each.in_flight for each in instances(made, D)] == [5, 5]
            assert all(each.in_flight == 0 for each in instances(made, P))
        release.set()
        assert await asyncio.gather(*streams) == [200] * 10
        await until(lambda: all(each.in_flight == 0 for each in made.proxy.fleet))

    with_house(test, decode=2)


def test_the_load_of_a_prefill_server_ends_with_its_answer() -> None:
    async def test(made: House) -> None:
        # P0 has prefilled long generations; P1 is at a long prompt now
        release, prefill_release = asyncio.Event(), asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return web.json_response({"choices": [{"text": "x"}]})

        async def slow_prefill(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await prefill_release.wait()
            return await prefill_answer(engine, request, body)

        made.decode[0].answer = slow
        first, second = instances(made, P)
        open_requests = [asyncio.create_task(status(made)) for _ in range(4)]
        await until(lambda: instances(made, D)[0].in_flight == 4)
        assert [first.in_flight, second.in_flight] == [0, 0]
        made.prefill[1].answer = slow_prefill
        while second.in_flight == 0:
            known = len(made.prefill[0].bodies) + len(made.prefill[1].bodies)
            open_requests.append(asyncio.create_task(status(made)))
            await until(lambda known=known: len(made.prefill[0].bodies) + len(made.prefill[1].bodies) > known)
        await until(lambda: first.in_flight == 0)
        before = len(made.prefill[0].bodies)
        for number in range(3):
            open_requests.append(asyncio.create_task(status(made)))
            await until(lambda number=number: len(made.prefill[0].bodies) == before + 1 + number)
            await until(lambda: first.in_flight == 0)
        assert second.in_flight == 1
        release.set()
        prefill_release.set()
        assert set(await asyncio.gather(*open_requests)) == {200}

    with_house(test, prefill=2, policy="least_loaded")


def test_what_became_of_engines_is_told_in_metrics_and_instances() -> None:
    async def test(made: House) -> None:
        made.prefill[1].answer = fail
        for _ in range(8):
            await status(made)
        fleet = made.proxy.fleet
        fleet.pair_failed(instances(made, P)[0], instances(made, D)[0], "500")
        _, text = await made.get("/metrics")
        first, second = (each.endpoint.authority for each in instances(made, P))
        assert f'baton_instance_state{{instance="{first}",role="prefill"}} 0.0' in text
        assert f'baton_instance_state{{instance="{second}",role="prefill"}} 1.0' in text
        assert f'baton_ejections_total{{instance="{second}",reason="failures",role="prefill"}} 1.0' in text
        assert f'baton_probes_failed_total{{instance="{second}",role="prefill"}} 0.0' in text
        decode = instances(made, D)[0].endpoint.authority
        assert f'baton_pair_failures_total{{decode="{decode}",prefill="{first}"}} 1.0' in text
        async with made.client.get(f"{made.url}/instances") as response:
            rows = {row["id"]: row for row in (await response.json())["instances"]}
        assert rows["P0"]["state"] == "usable"
        assert (rows["P1"]["state"], rows["P1"]["breaker"], rows["P1"]["usable"]) == ("open", "open", False)
        assert rows["P1"]["last_error"] == "a request was answered 500"
        assert time.time() - 60 < rows["P1"]["since"] <= time.time()

    with_house(test, prefill=2, breaker=BreakerRules(failures=3, open_seconds=60.0))


async def hang_after_head(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await stream(request, [])
    return await hang()


async def hang_in_stream(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    await stream(request, [b'data: {"choices": [{"text": "a"}]}\n\n'])
    return await hang()


SILENT = {"probe_interval_seconds": 0.05, "probe_timeout_seconds": 0.2}


@pytest.mark.parametrize(("role", "answer"), [(P, hang), (D, hang), (D, hang_after_head)])
def test_who_waits_on_an_engine_that_answers_no_probe_is_served_by_another(role: Role, answer: Any) -> None:
    async def test(made: House) -> None:
        engine, instance = (made.prefill if role is P else made.decode)[1], instances(made, role)[1]
        await until(lambda: instance.usable)
        engine.health, engine.answer = None, answer
        async with asyncio.timeout(30):
            assert await asyncio.gather(*(status(made, stream=True) for _ in range(4))) == [200] * 4
        assert not instance.usable
        assert made.proxy.way.metrics.failovers.family().samples[0].value > 0
        await until(lambda: engine.gone > 0 and instance.in_flight == 0)

    with_house(test, prefill=2, decode=2, **SILENT)


def test_an_engine_that_answers_probes_is_waited_for() -> None:
    async def test(made: House) -> None:
        engine, release = made.prefill[0], asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await prefill_answer(engine, request, body)

        engine.answer = slow
        asking = asyncio.create_task(status(made))
        await asyncio.sleep(2.5)  # the sweep has come by twice
        release.set()
        assert await asking == 200
        assert (engine.gone, made.prefill[1].bodies) == (0, [])

    with_house(test, prefill=2, **SILENT)


def test_an_engine_that_answers_no_probe_is_waited_for_a_while_when_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("baton.proxy.upstream.SILENT_SECONDS", 3.0)

    async def test(made: House) -> None:
        (engine,), (instance,) = made.prefill, instances(made, P)
        await until(lambda: instance.usable)
        engine.health, engine.answer = None, hang
        began = time.monotonic()
        assert await status(made) == 504
        assert 3.0 <= time.monotonic() - began < 20.0
        await until(lambda: engine.gone == 1)

    with_house(test, **SILENT)


@pytest.mark.parametrize("role", [P, D])
def test_an_engine_that_is_well_and_never_answers_is_not_waited_for_for_ever(role: Role) -> None:
    async def test(made: House) -> None:
        engine, instance = (made.prefill if role is P else made.decode)[0], instances(made, role)[0]
        engine.answer = hang
        async with asyncio.timeout(20):
            assert await asyncio.gather(status(made), status(made)) == [200, 200]
        assert instance.last_error.startswith("a request failed: nothing was heard for")
        await until(lambda: engine.gone == 1)

    patience = Patience(**{str(role): 0.5})
    with_house(test, prefill=2, decode=2, patience=patience)


def test_a_stream_that_stands_still_for_too_long_ends_with_an_error_event() -> None:
    async def test(made: House) -> None:
        made.decode[0].answer = hang_in_stream
        async with asyncio.timeout(20), made.post({"prompt": "a", "stream": True}) as response:
            raw = await response.read()
        assert response.status == 200
        assert b'"text": "a"' in raw
        assert b'"code":504' in raw
        assert b"[DONE]" not in raw

    with_house(test, patience=Patience(decode=0.5))
