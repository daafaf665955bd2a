"""Requests that survive an engine that fails, over real sockets to fake engines. In the end no ticket is out."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Endpoint, Role
from baton.proxy import Retries
from tests.proxy.fakes import TOKENS, FakeEngine, House, decode_answer, hang, prefill_answer, stream, until, with_house

TEXT = "".join(TOKENS)
P, D = Role.PREFILL, Role.DECODE
QUICK = Retries(initial_seconds=0.01, max_seconds=0.02)


def with_spares(test: Callable[[House], Awaitable[None]], *, held: int = 0, **options: Any) -> None:
    """Run *test* in a house of two engines a role, whose health nobody asks for; in the end nothing is left of it.

    *held* is how many KV caches prefill servers may still hold: they wait for their lease.
    """

    async def go(made: House) -> None:
        async with asyncio.timeout(30):
            await test(made)
            await at_rest(made, held)

    with_house(go, **{"prefill": 2, "decode": 2, "probe_interval_seconds": 600.0, "retries": QUICK, **options})


def as_new(made: House) -> None:
    """Nothing has failed yet, and each pool's first is next."""
    for instance in made.proxy.fleet:
        for breaker in (instance.breaker, instance.hand_offs):
            breaker.reset(time.monotonic())
        instance.set_usable(True, "as new")
        instance._settle("as new")
    for pool in (P, D):
        policy: Any = getattr(made.proxy.way, f"{pool}_policy")
        policy._last = -1


async def at_rest(made: House, held: int = 0) -> None:
    """Soon after the end nothing is held, in flight or out, and every ticket came to one end."""
    tickets = made.proxy.way.outstanding
    async with asyncio.timeout(10.0):
        while (
            len(made.ledger.held) > held
            or any(instance.in_flight or (not held and tickets.count(instance.id)) for instance in made.proxy.fleet)
            or made.proxy.way.releases.under_way
        ):
            await asyncio.sleep(0.005)
    assert len(made.ledger.held) == held
    ends = (tickets.used, tickets.dropped, tickets.expired)
    for instance in made.proxy.fleet.pools[P]:
        out = tickets.count(instance.id)
        assert tickets.given[instance.id] == sum(each[instance.id] for each in ends) + out


async def ask(made: House, body: dict[str, Any] | None = None, **options: Any) -> tuple[int, bytes]:
    async with made.post(body or {"prompt": "a"}, **options) as response:
        return response.status, await response.read()


def text_of(raw: bytes) -> str:
    """The text of an answer or of a whole stream."""
    if raw.startswith(b"{"):
        return str(json.loads(raw)["choices"][0]["text"])
    events = [line[6:] for line in raw.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    return "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1])


async def metrics(made: House) -> dict[str, float]:
    _, text = await made.get("/metrics")
    return {
        name: float(value)
        for line in text.splitlines()
        if not line.startswith("#")
        for name, _, value in (line.rpartition(" "),)
    }


async def close(engine: FakeEngine) -> None:
    assert engine.server is not None
    await engine.server.close()


# what may go wrong


def refusing(status: int) -> Any:
    async def refuse(*_: Any) -> web.StreamResponse:
        return web.Response(status=status, body=b'{"error": "own words"}', content_type="application/json")

    return refuse


async def cut(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Breaks off before the head."""
    assert request.transport is not None
    request.transport.abort()
    return await hang()


async def cut_after_head(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Breaks off between the head and the first byte of the body."""
    kind = "text/event-stream" if body.get("stream") else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind})
    await response.prepare(request)
    await response.write(b"")
    await asyncio.sleep(0.02)
    return await cut(engine, request, body)


async def cut_in_json(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Breaks off within an answer in one piece."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "100"})
    await response.prepare(request)
    await response.write(b'{"choices": [')
    await asyncio.sleep(0.02)
    return await cut(engine, request, body)


async def generation_fails(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Says 200, and that it failed."""
    failed = b'{"choices": [{"index": 0, "text": "", "finish_reason": "error"}]}'
    if body.get("stream"):
        return await stream(request, [b"data: " + failed + b"\n\n", b"data: [DONE]\n\n"])
    return web.Response(body=failed, content_type="application/json")


async def error_event(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    return await stream(request, [b'data: {"error": {"message": "own words", "code": 500}}\n\n'])


PREFILL_FAULTS = [
    pytest.param(refusing(500), "server_error", id="500"),
    pytest.param(refusing(503), "unavailable", id="503"),
    pytest.param(cut, "broke", id="cut"),
    pytest.param(cut_after_head, "broke", id="cut-after-head"),
    pytest.param(generation_fails, "server_error", id="generation-fails"),
]
DECODE_FAULTS = [
    pytest.param(refusing(500), "server_error", id="500"),
    pytest.param(refusing(503), "unavailable", id="503"),
    pytest.param(cut, "broke", id="cut"),
    pytest.param(cut_after_head, "broke", id="cut-after-head"),
    pytest.param(generation_fails, "server_error", id="generation-fails"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fault", "cause"), PREFILL_FAULTS)
def test_a_prefill_server_that_fails_costs_the_request_nothing_but_time(fault: Any, cause: str, streamed: bool) -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = fault
        async with made.post({"prompt": "a", "stream": streamed}) as response:
            assert response.status == 200
            assert response.headers["x-baton-prefill"] == "P1"
            assert text_of(await response.read()) == TEXT
        assert [len(each.bodies) for each in (*made.prefill, *made.decode)] == [1, 1, 1, 0]
        counted = await metrics(made)
        assert counted[f'baton_retries_total{{cause="{cause}",phase="prefill"}}'] == 1
        assert counted["baton_failovers_total"] == 1
        assert counted["baton_handed_off_total"] == 1

    with_spares(test)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fault", "cause"), [*DECODE_FAULTS, pytest.param(cut_in_json, "broke", id="cut-in-json")])
def test_a_decode_server_that_fails_before_the_client_heard_anything_costs_one_more_prefill(
    fault: Any, cause: str, streamed: bool
) -> None:
    async def test(made: House) -> None:
        made.decode[0].answer = fault
        async with made.post({"prompt": "a", "stream": streamed and fault is not cut_in_json}) as response:
            assert response.status == 200
            assert response.headers["x-baton-decode"] == "D1"
            assert text_of(await response.read()) == TEXT
        assert sum(len(each.bodies) for each in made.prefill) == 2
        assert [len(each.bodies) for each in made.decode] == [1, 1]
        # a ticket each, and an id each: no engine can take one attempt for the other
        tickets = [each.bodies[0]["kv_transfer_params"]["remote_block_ids"] for each in made.decode]
        assert tickets == [[[0]], [[1]]]
        ids = [each.headers[0]["x-request-id"] for each in made.decode]
        assert ids[1] == f"{ids[0]}~1"
        counted = await metrics(made)
        assert counted[f'baton_retries_total{{cause="{cause}",phase="decode"}}'] == 1
        assert counted["baton_failovers_total"] == 1

    with_spares(test)


def test_a_stream_whose_first_event_is_an_error_is_tried_again() -> None:
    async def test(made: House) -> None:
        made.decode[0].answer = error_event
        status, raw = await ask(made, {"prompt": "a", "stream": True})
        assert (status, text_of(raw)) == (200, TEXT)

    with_spares(test)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("role", [P, D])
def test_a_server_that_cannot_be_reached_is_passed_over_and_is_asked_no_more(role: Role, streamed: bool) -> None:
    async def test(made: House) -> None:
        await close((made.prefill if role is P else made.decode)[0])
        for _ in range(4):
            status, raw = await ask(made, {"prompt": "a", "stream": streamed})
            assert (status, text_of(raw)) == (200, TEXT)
        counted = await metrics(made)
        assert counted[f'baton_retries_total{{cause="connect",phase="{role}"}}'] == 1
        if role is D:
            # the ticket that it never got was another's to give back
            await until(lambda: sorted(made.ledger.pulled) == [0, 1, 2, 3, 4])

    with_spares(test)


def test_both_phases_may_fail_in_one_request() -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = made.decode[0].answer = cut
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)
        assert [len(each.bodies) for each in (*made.prefill, *made.decode)] == [1, 2, 1, 1]

    with_spares(test)


def test_a_prefill_server_whose_tickets_fail_decode_servers_is_left_too() -> None:
    async def test(made: House) -> None:
        async def unless_from_p1(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if len(made.prefill[1].bodies) == 0:
                return web.json_response({"error": "the KV cache cannot be read"}, status=500)
            return await decode_answer(engine, request, body)

        for engine in made.decode:
            engine.answer = unless_from_p1
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)

    with_spares(test)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 422, 429])
@pytest.mark.parametrize("role", [P, D])
def test_a_clients_own_mistake_is_told_at_once(role: Role, status: int, streamed: bool) -> None:
    async def test(made: House) -> None:
        for engine in made.prefill if role is P else made.decode:
            engine.answer = refusing(status)
        assert await ask(made, {"prompt": "a", "stream": streamed}) == (status, b'{"error": "own words"}')
        assert sum(len(each.bodies) for each in made.prefill) == 1
        assert sum(len(each.bodies) for each in made.decode) == (0 if role is P else 1)
        assert not any(name.startswith("baton_retries_total") for name in await metrics(made))

    with_spares(test)


def test_nothing_is_tried_again_once_the_client_has_heard_a_part_of_the_answer() -> None:
    async def test(made: House) -> None:
        async def half(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await stream(request, [b'data: {"choices": [{"text": "one"}]}\n\n'])
            await asyncio.sleep(0.05)
            return await cut(engine, request, body)

        made.decode[0].answer = half
        status, raw = await ask(made, {"prompt": "a", "stream": True})
        assert status == 200
        assert raw.startswith(b'data: {"choices": [{"text": "one"}]}\n\n') and b"[DONE]" not in raw
        assert json.loads(raw.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == 502
        assert [len(each.bodies) for each in (*made.prefill, *made.decode)] == [1, 0, 1, 0]

    with_spares(test)


RESPONSES = "/v1/responses"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": "a", "metadata": {"finish_reason": "error"}}),
        (RESPONSES, {"input": "a", "tools": [{"parameters": {"default": {"finish_reason": "abort"}}}]}),
        (RESPONSES, {"input": "a", "metadata": {"status": "failed"}}),
    ],
)
def test_what_a_client_said_makes_no_answer_a_failure(path: str, body: dict[str, Any]) -> None:
    def saying_again(answer: dict[str, Any]) -> Any:
        async def say(engine: FakeEngine, _: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            said = {name: body[name] for name in ("metadata", "tools") if name in body}
            if engine.role is P:
                ticket = {"do_remote_prefill": True, "remote_engine_id": "p"}
                said["kv_transfer_params"] = {**ticket, "remote_block_ids": [[engine.ledger.give()]]}
            return web.json_response({**answer, **said})

        return say

    async def test(made: House) -> None:
        for engine in made.prefill:
            engine.answer = saying_again({"id": "resp_1", "status": "incomplete", "output": []})
        for engine in made.decode:
            engine.answer = saying_again({"id": "resp_1", "status": "completed", "output": []})
        async with made.post(body, path) as response:
            assert response.status == 200
            assert (await response.json())["status"] == "completed"
        assert [len(each.bodies) for each in (*made.prefill, *made.decode)] == [1, 0, 1, 0]

    with_spares(test)


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/v1/completions", {"choices": [{"text": "", "finish_reason": "error"}]}),
        ("/v1/completions", {"choices": [{"text": "", "finish_reason": "abort"}]}),
        (RESPONSES, {"id": "resp_1", "status": "failed", "output": []}),
    ],
)
def test_a_prompt_that_failed_is_computed_elsewhere_and_its_ticket_given_back(
    path: str, answer: dict[str, Any]
) -> None:
    async def test(made: House) -> None:
        async def fail(engine: FakeEngine, _: web.Request, __: dict[str, Any]) -> web.StreamResponse:
            ticket = {"do_remote_prefill": True, "remote_engine_id": "p"}
            return web.json_response(
                {**answer, "kv_transfer_params": {**ticket, "remote_block_ids": [[engine.ledger.give()]]}}
            )

        made.prefill[0].answer = fail
        async with made.post({"prompt": "a", "input": "a"}, path) as response:
            assert response.status == 200
        assert [len(each.bodies) for each in made.prefill] == [1, 1]
        assert made.proxy.way.outstanding.given == {"P0": 1, "P1": 1}
        await until(lambda: made.ledger.held == set())

    with_spares(test)


def test_a_comment_is_no_part_of_the_answer() -> None:
    async def test(made: House) -> None:
        async def late(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await asyncio.sleep(0.2)
            return await cut(engine, request, body)

        made.prefill[0].answer = late
        status, raw = await ask(made, {"prompt": "a", "stream": True})
        assert status == 200
        assert raw.startswith(b": keep-alive\n\n")
        assert text_of(raw.replace(b": keep-alive\n\n", b"")) == TEXT

    with_spares(test, keep_alive_seconds=0.04)


@pytest.mark.parametrize("role", [P, D])
def test_the_only_server_is_asked_again_after_a_503_and_not_after_a_500(role: Role) -> None:
    async def test(made: House) -> None:
        engine = (made.prefill if role is P else made.decode)[0]

        def failing_once(status: int) -> Any:
            async def once(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
                engine.answer = None
                refused: web.StreamResponse = await refusing(status)()
                return refused

            return once

        engine.answer = failing_once(503)
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)
        engine.answer = failing_once(500)
        assert (await ask(made))[0] == 500

    with_spares(test, prefill=1, decode=1)


def test_waits_between_attempts_grow_and_end() -> None:
    async def test(made: House) -> None:
        at: list[float] = []

        async def busy(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            at.append(time.monotonic())
            refused: web.StreamResponse = await refusing(503)()
            return refused

        made.prefill[0].answer = busy
        assert await ask(made) == (503, b'{"error": "own words"}')
        waits = [later - earlier for earlier, later in itertools.pairwise(at)]
        assert len(waits) == 3
        assert waits[0] >= 0.05 and waits[1] >= 0.1 and waits[2] >= 0.2
        assert made.decode[0].bodies == []

    retries = Retries(most=3, initial_seconds=0.05, max_seconds=1.0, multiplier=2.0, jitter=0.0)
    with_spares(test, prefill=1, decode=1, retries=retries)


@pytest.mark.parametrize(("most", "asked"), [(0, 1), (1, 2), (3, 4)])
def test_attempts_are_bounded_and_the_last_failure_is_told(most: int, asked: int) -> None:
    async def test(made: House) -> None:
        for engine in made.prefill:
            engine.answer = refusing(500)
        assert await ask(made) == (500, b'{"error": "own words"}')
        assert sum(len(each.bodies) for each in made.prefill) == asked

    with_spares(test, prefill=6, retries=Retries(most=most))


def test_a_restart_that_is_shorter_than_the_waits_is_waited_for() -> None:
    async def test(made: House) -> None:
        engine = made.prefill[0]
        port = engine.endpoint.port
        await close(engine)
        asking = asyncio.ensure_future(ask(made))
        await until(lambda: not made.proxy.fleet.pools[P][0].usable)
        await engine.start_on(port)
        status, raw = await asking
        assert (status, text_of(raw)) == (200, TEXT)
        await close(engine)

    retries = Retries(most=20, initial_seconds=0.1, max_seconds=0.5)
    with_spares(test, prefill=1, decode=1, probe_interval_seconds=0.05, retries=retries)


def test_when_all_of_a_role_are_gone_the_client_is_told_what_happened() -> None:
    async def test(made: House) -> None:
        for engine in made.prefill:
            await close(engine)
        status, raw = await ask(made)
        assert status == 503
        assert json.loads(raw)["error"]["message"] == "the prefill server cannot be reached"

    with_spares(test)


# several answers, turns, the prompt alone


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("role", [P, D])
@pytest.mark.parametrize("fault", [cut, refusing(500), cut_after_head, generation_fails])
def test_a_part_that_an_engine_fails_is_tried_again_by_itself(fault: Any, role: Role, streamed: bool) -> None:
    async def test(made: House) -> None:
        (made.prefill if role is P else made.decode)[0].answer = fault
        status, raw = await ask(made, {"prompt": ["a", "b", "c"], "stream": streamed})
        assert status == 200
        if streamed:
            assert raw.count(b'"one"') == 3 and raw.endswith(b"data: [DONE]\n\n")
        else:
            assert [each["text"] for each in json.loads(raw)["choices"]] == [TEXT] * 3

    with_spares(test)


@pytest.mark.parametrize("role", [P, D])
def test_samples_survive_the_failure_of_the_first(role: Role) -> None:
    async def test(made: House) -> None:
        (made.prefill if role is P else made.decode)[0].answer = cut
        status, raw = await ask(made, {"prompt": "a", "n": 3})
        assert status == 200
        assert [each["text"] for each in json.loads(raw)["choices"]] == [TEXT] * 3

    with_spares(test)


def test_a_prompt_alone_is_computed_by_another() -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = cut
        status, _ = await ask(made, {"prompt": "a", "echo": True, "max_tokens": 0})
        assert status == 200
        assert [len(each.bodies) for each in made.prefill] == [1, 1]
        made.ledger.held.clear()  # the fake gives a ticket though none was asked for

    with_spares(test)


# nothing left behind


async def leave(made: House, when: Callable[[], bool], body: dict[str, Any] | None = None) -> None:
    """Ask, and be gone once *when* is true."""
    asking = asyncio.ensure_future(made.post(body or {"prompt": "a"}).__aenter__())
    await until(when)
    asking.cancel()
    (begun,) = await asyncio.gather(asking, return_exceptions=True)
    if not isinstance(begun, BaseException):
        begun.close()


def connecting(made: House, role: Role, place: int) -> tuple[asyncio.Event, list[int]]:
    """Makes connections of the proxy to one instance wait for the event; the list grows with each that waits."""
    instance = made.proxy.fleet.pools[role][place]
    pool = made.proxy.way.upstream._pools[instance.id]
    free, waiting, connect = asyncio.Event(), list[int](), pool.connect

    async def slow() -> Any:
        waiting.append(1)
        await free.wait()
        return await connect()

    pool.connect = slow  # type: ignore[method-assign]
    pool.take = lambda: None  # type: ignore[method-assign]
    return free, waiting


def test_a_ticket_whose_client_left_while_decode_is_called_is_given_to_another_when_that_cannot_be_reached() -> None:
    async def test(made: House) -> None:
        _, waiting = connecting(made, D, 0)
        await leave(made, lambda: bool(waiting))
        # D0 never answers the call: after a while the other is told
        await until(lambda: made.ledger.pulled == [0])
        assert [len(each.bodies) for each in made.decode] == [0, 1]

    with_spares(test)


def test_when_no_decode_server_can_be_reached_the_ticket_is_out_until_its_lease_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(made: House) -> None:
        for engine in made.decode:
            await close(engine)
        assert (await ask(made))[0] == 503
        (address,) = [each.endpoint.authority for each in made.proxy.fleet.pools[P] if each.id == "P0"]
        out = f'baton_tickets_outstanding{{instance="{address}"}}'
        await until(lambda: "until its lease is over" in caplog.text)
        assert (await metrics(made))[out] >= 1
        assert made.ledger.pulled == []

    with caplog.at_level(logging.WARNING, "baton.proxy"):
        with_spares(test, held=2)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "headed", "stream"])
def test_a_client_that_leaves_in_the_second_attempt_leaves_nothing(phase: str, streamed: bool) -> None:
    async def test(made: House) -> None:
        async def begun(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if streamed:
                await stream(request, [b"data: 1\n\n"] if phase == "stream" else [])
            return await hang()

        made.prefill[0].answer = made.decode[0].answer = cut
        if phase == "prefill":
            made.prefill[1].answer = hang
        made.decode[1].answer = begun
        engine = made.prefill[1] if phase == "prefill" else made.decode[1]
        for count in range(1, 4):
            as_new(made)
            await leave(made, lambda: len(engine.bodies) == count, {"prompt": "a", "stream": streamed})  # noqa: B023
            await until(lambda: engine.gone == count)  # noqa: B023

    with_spares(test)


def test_a_client_that_leaves_while_its_request_waits_to_be_tried_again_leaves_nothing() -> None:
    async def test(made: House) -> None:
        made.decode[0].answer = refusing(503)
        await leave(made, lambda: made.decode[0].bodies != [])
        await at_rest(made)
        assert len(made.prefill[0].bodies) == 1

    with_spares(test, prefill=1, decode=1, retries=Retries(initial_seconds=60.0, max_seconds=60.0))


@pytest.mark.parametrize("streamed", [False, True])
def test_when_one_part_fails_the_tickets_of_the_others_are_given_back(streamed: bool) -> None:
    async def test(made: House) -> None:
        _, waiting = connecting(made, D, 0)

        async def third_is_refused(
            engine: FakeEngine, request: web.Request, body: dict[str, Any]
        ) -> web.StreamResponse:
            if body["prompt"] != "c":
                return await prefill_answer(engine, request, body)
            await until(lambda: len(waiting) >= 1)
            return web.json_response({"error": "own words"}, status=400)

        for engine in made.prefill:
            engine.answer = third_is_refused
        status, _ = await ask(made, {"prompt": ["a", "b", "c"], "stream": streamed})
        assert status == 400
        await until(lambda: sorted(made.ledger.pulled) == [0, 1])

    with_spares(test)


class RacingPrefill:
    """A prefill server whose answer and whose client's leaving cross each other on the wire."""

    def __init__(self, made: House, place: int = 0, *, packed: bool = False) -> None:
        self.packed = packed
        self.ledger = made.ledger
        self.asked = 0
        self.made = made
        self.engine = made.prefill[place]

    async def stand_in(self) -> None:
        port = self.engine.endpoint.port
        await close(self.engine)
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(int(length.split(b":")[1]))
        self.asked += 1
        await reader.read()
        ticket = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[self.ledger.give()]]}
        body = json.dumps({"choices": [], "kv_transfer_params": ticket}).encode()
        coding = b""
        if self.packed:
            body, coding = gzip.compress(body), b"content-encoding: gzip\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (coding, len(body), body))
        writer.close()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_of_prefill_that_crosses_with_the_clients_leaving_leaves_no_ticket(
    streamed: bool, packed: bool
) -> None:
    async def test(made: House) -> None:
        racing = RacingPrefill(made, packed=packed)
        await racing.stand_in()
        await leave(made, lambda: racing.asked == 1, {"prompt": "a", "stream": streamed})
        await until(lambda: made.ledger.pulled == [0])
        assert made.proxy.way.outstanding.dropped["P0"] == 1
        racing.server.close()

    with_spares(test, prefill=1)


def test_an_answer_of_prefill_that_is_here_unread_when_its_client_leaves_leaves_no_ticket() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = slow
        asking = asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__())
        await until(lambda: made.prefill[0].bodies != [])
        pool = made.proxy.way.upstream._pools["P0"]
        (connection,) = [each for each in pool._all if not each.reusable]
        (task,) = [
            each
            for each in asyncio.all_tasks()
            if each.get_coro().__qualname__ == "Connection._run"  # type: ignore[union-attr]
        ]
        complete = connection._complete_now

        def complete_and_leave() -> None:
            complete()
            task.cancel()

        connection._complete_now = complete_and_leave  # type: ignore[method-assign]
        free.set()
        await until(lambda: made.ledger.pulled == [0])
        asking.cancel()

    with_spares(test, prefill=1)


# the whole time of a request


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["line", "prefill", "decode", "stream", "again"])
def test_the_whole_time_of_a_request_covers_every_phase(phase: str, streamed: bool) -> None:
    async def test(made: House) -> None:
        async def drip(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if streamed:
                await stream(request, [b"data: 1\n\n"])
            return await hang()

        if phase == "line":
            assert made.proxy.way.gate.try_enter()
        if phase == "prefill":
            made.prefill[0].answer = hang
        if phase == "decode":
            made.decode[0].answer = hang
        if phase == "stream":
            made.decode[0].answer = drip
        if phase == "again":
            made.prefill[0].answer = cut
            made.prefill[1].answer = hang
        began = time.monotonic()
        status, raw = await ask(made, {"prompt": "a", "stream": streamed})
        assert 0.25 < time.monotonic() - began < 20.0
        if phase == "stream" and streamed:
            assert status == 200 and b'"code":504' in raw and b"[DONE]" not in raw
        else:
            assert status == 504
        told = {"line": "the request", "prefill": "the prefill server", "again": "the prefill server"}
        assert f"{told.get(phase, 'the decode server')} took too long".encode() in raw
        if phase == "line":
            made.proxy.way.gate.leave()
        assert made.proxy.way.gate.active == 0
        if phase in ("decode", "stream"):
            await until(lambda: made.decode[0].gone == 1)

    with_spares(test, request_timeout_seconds=0.3, max_requests=1)


def test_a_wait_that_would_outlast_the_request_is_not_begun() -> None:
    async def test(made: House) -> None:
        made.prefill[0].answer = refusing(503)
        began = time.monotonic()
        assert (await ask(made))[0] == 503
        assert time.monotonic() - began < 20.0

    retries = Retries(initial_seconds=60.0, max_seconds=60.0)
    with_spares(test, prefill=1, decode=1, request_timeout_seconds=30.0, retries=retries)


# tickets and time


def test_a_ticket_that_is_too_old_when_decode_is_reached_is_not_used() -> None:
    async def test(made: House) -> None:
        free, waiting = connecting(made, D, 0)
        asking = asyncio.ensure_future(ask(made))
        await until(lambda: bool(waiting))
        await asyncio.sleep(0.15)
        free.set()
        status, raw = await asking
        assert (status, text_of(raw)) == (200, TEXT)
        counted = await metrics(made)
        assert counted['baton_retries_total{cause="stale",phase="decode"}'] == 1
        assert len(made.prefill[0].bodies) == 2
        # and the old one is given back, not used
        await until(lambda: sorted(made.ledger.pulled) == [0, 1])

    with_spares(test, prefill=1, decode=1, ticket_max_age_seconds=0.1)


def test_tickets_and_their_age_are_measured_by_prefill_server() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await decode_answer(engine, request, body)

        made.decode[0].answer = slow
        asking = asyncio.ensure_future(ask(made))
        await until(lambda: made.decode[0].bodies != [])
        address = made.proxy.fleet.pools[P][0].endpoint.authority

        def of(name: str) -> str:
            return f'{name}{{instance="{address}"}}'

        counted = await metrics(made)
        assert counted[of("baton_tickets_outstanding")] == 1
        assert counted[of("baton_ticket_oldest_seconds")] > 0
        # nothing is in flight on it all the same: it is free for the next prompt
        assert made.proxy.fleet.pools[P][0].in_flight == 0
        free.set()
        await asking
        counted = await metrics(made)
        assert counted[of("baton_tickets_outstanding")] == 0
        assert counted[of("baton_ticket_oldest_seconds")] == 0
        assert (counted[of("baton_tickets_given_total")], counted[of("baton_tickets_used_total")]) == (1, 1)

    with_spares(test, prefill=1)


def test_a_ticket_is_out_no_longer_once_the_stream_has_begun() -> None:
    async def test(made: House) -> None:
        async def endless(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await stream(request, [b"data: 1\n\n"])
            return await hang()

        made.decode[0].answer = endless
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            assert made.proxy.way.outstanding.count("P0") == 0
            assert made.proxy.way.outstanding.used["P0"] == 1

    with_spares(test)


def held_up(made: House) -> asyncio.Event:
    """Let no decode server answer before this event."""
    free = asyncio.Event()

    async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await free.wait()
        return await decode_answer(engine, request, body)

    for engine in made.decode:
        engine.answer = slow
    return free


def test_a_request_in_line_has_no_blocks_anywhere() -> None:
    async def test(made: House) -> None:
        free = held_up(made)
        asking = [asyncio.ensure_future(ask(made)) for _ in range(5)]
        await until(lambda: sum(len(each.bodies) for each in made.decode) == 2 and made.proxy.way.gate.waiting == 3)
        assert sum(len(each.bodies) for each in made.prefill) == 2
        free.set()
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}

    with_spares(test, max_requests=2)


def test_a_request_for_which_no_decode_server_has_a_place_waits_before_its_prefill() -> None:
    async def test(made: House) -> None:
        free = held_up(made)
        gate, pool = made.proxy.way.decode_gate, made.proxy.fleet.pools[D]
        assert gate is not None
        asking = [asyncio.create_task(ask(made)) for _ in range(7)]
        await until(lambda: [len(each.bodies) for each in made.decode] == [2, 2] and gate.waiting == 3)
        # as many prefills as there are places, and an even share each
        assert sum(len(each.bodies) for each in made.prefill) == 4
        assert [each.booked for each in pool] == [2, 2]
        assert (await metrics(made))["baton_queued_requests"] == 3
        made.proxy.fleet.add(Endpoint(role=D, host="127.0.0.1", port=1)).set_usable(True, "test")
        assert gate.most == 6
        pool = made.proxy.fleet.pools[D]
        pool[2].set_usable(False, "test")
        assert gate.most == 4
        free.set()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 7
        assert (gate.active, gate.waiting, [each.booked for each in pool]) == (0, 0, [0, 0, 0])

    with_spares(test, max_decode_requests=2)


@pytest.mark.parametrize("phase", ["line", "prefill", "decode"])
def test_who_leaves_gives_its_place_at_a_decode_server_back(phase: str) -> None:
    async def test(made: House) -> None:
        gate, pool = made.proxy.way.decode_gate, made.proxy.fleet.pools[D]
        assert gate is not None
        engines = made.prefill if phase == "prefill" else made.decode
        for engine in engines:
            engine.answer = hang
        asking = [asyncio.create_task(ask(made)) for _ in range(2)]
        await until(lambda: sum(len(each.bodies) for each in engines) == 2)
        if phase == "line":
            asking.append(asyncio.create_task(ask(made, {"prompt": ["a", "b"]})))
            await until(lambda: gate.waiting == 1)
        for each in reversed(asking):
            each.cancel()
        await until(lambda: (gate.active, gate.waiting, [each.booked for each in pool]) == (0, 0, [0, 0]))

    with_spares(test, max_decode_requests=1)


def test_the_places_of_a_request_for_several_answers_are_as_many() -> None:
    async def test(made: House) -> None:
        gate = made.proxy.way.decode_gate
        assert gate is not None
        for body in (
            {"prompt": ["a", "b", "c"]},
            {"prompt": "a", "n": 9},
            {"prompt": "a", "echo": True, "max_tokens": 0},
        ):
            assert (await ask(made, body))[0] == 200
            assert (gate.active, [each.booked for each in made.proxy.fleet.pools[D]]) == (0, [0, 0])

    with_spares(test, held=1, max_decode_requests=2)


def test_zero_blocks_are_a_ticket_like_any_other() -> None:
    async def test(made: House) -> None:
        async def no_blocks(*_: Any) -> web.StreamResponse:
            ticket = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": []}
            return web.json_response({"choices": [], "kv_transfer_params": ticket})

        made.prefill[0].answer = no_blocks
        status, raw = await ask(made)
        assert (status, text_of(raw)) == (200, TEXT)
        assert made.decode[0].bodies[0]["kv_transfer_params"]["remote_block_ids"] == []
        assert (await metrics(made))["baton_prefill_without_ticket_total"] == 0

    with_spares(test)


# what is written down


def test_the_access_log_says_how_often_a_request_was_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "log"

    async def test(made: House) -> None:
        made.prefill[0].answer = cut
        assert (await ask(made))[0] == 200
        made.prefill[0].answer = None
        assert (await ask(made))[0] == 200

    with_spares(test, access_log=str(path))
    first, second = path.read_text().splitlines()
    assert first.endswith(" retries=1") and "prefill=P1 decode=D0" in first
    assert "retries" not in second


@pytest.mark.parametrize("fault", [refusing(400), refusing(500), cut])
def test_a_ticket_that_a_decode_server_did_not_take_when_it_failed_is_freed_through_it(fault: Any) -> None:
    """Whatever stands before an engine may answer in its place, or cut: then nobody has told the prefill server."""

    async def test(made: House) -> None:
        made.decode[0].answer = fault
        made.decode[0].front = True
        await ask(made)
        await until(lambda: made.ledger.released == [0])
        assert made.ledger.pulled == [1] * len(made.decode[1].bodies)

    with_spares(test)
