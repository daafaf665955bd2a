"""Conversations through the proxy, over real sockets: whose blocks are used for what, and what nobody gets to see."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from baton.proxy.turns import Why
from tests.proxy.conversations import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Bidirectional, Talk, pieces, whole
from tests.proxy.fakes import FakeEngine, Handler, House, hang, settled, stream, until, with_house

PATHS = [COMPLETIONS, CHAT, RESPONSES, MESSAGES]


def talking(test: Callable[[Bidirectional], Awaitable[None]], **options: Any) -> None:
    async def go(made: House) -> None:
        await test(Bidirectional(made))

    # A probe that is late on a busy machine would count as an outage.
    with_house(go, **{"turns": True, "probe_interval_seconds": 60.0, **options})


def counts(engines: Bidirectional) -> tuple[int, int, dict[str, int]]:
    store = engines.store
    assert store.kept == store.used + store.dropped.total() + len(store)
    return store.kept, store.used, dict(store.missed)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("by_header", [False, True])
def test_five_turns_use_what_the_one_before_left(path: str, streamed: bool, by_header: bool) -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made, path, streamed, by_header=by_header)
        for _ in range(5):
            await talk.say()
        assert counts(engines) == (5, 4, {"none": 1})
        # each was pulled whole: all that was said before, and the answer to it
        said = talk.history
        assert engines.pulled == ["".join(said[: 2 * turn]) for turn in range(1, 5)]
        for engine in (*engines.made.prefill, *engines.made.decode):
            assert all(b"conversation" not in raw and b"talk" not in raw for raw in engine.raws)
            assert all("x-session-id" not in headers for headers in engine.headers)
        assert all(b"kv_transfer_params" not in raw for raw in talk.raws)

    talking(test, prefill=2, decode=2)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("place", ["finish", "usage", "alone"])
def test_wherever_the_ticket_stands_in_a_stream_it_is_found_and_nothing_is_left_of_it(path: str, place: str) -> None:
    async def test(engines: Bidirectional) -> None:
        engines.place = place
        talk = Talk(engines.made, path, streamed=True)
        for turn in range(3):
            await talk.say()
            left = [each for each in pieces(path, f"answer {turn + 1}. ", None, place) if b'"choices": []}' not in each]
            sent = [each + b"\n\n" for each in talk.raws[-1].split(b"\n\n")[:-1]]
            assert [normal(each) for each in sent] == [normal(each) for each in left]
        assert counts(engines) == (3, 2, {"none": 1})

    talking(test)


def normal(event: bytes) -> Any:
    data = event.removeprefix(b"data: ").strip()
    return data if data == b"[DONE]" else json.loads(data)


@pytest.mark.parametrize("place", ["finish", "alone"])
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_in_single_bytes_keeps_its_turn_too(path: str, place: str) -> None:
    async def test(engines: Bidirectional) -> None:
        async def bytewise(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            raw = b"".join(pieces(path, "answer 1. ", engines.give(engine, request, ""), place))
            return await stream(request, [raw[at : at + 1] for at in range(len(raw))])

        engines.made.decode[0].answer = bytewise
        await Talk(engines.made, path, streamed=True).say()
        assert counts(engines) == (1, 0, {"none": 1})

    talking(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_two_tenants_with_one_name_for_their_conversations_share_nothing(streamed: bool) -> None:
    async def test(engines: Bidirectional) -> None:
        talks = [Talk(engines.made, streamed=streamed, key=f"Bearer {name}") for name in ("one", "two")]
        for _ in range(3):
            for talk in talks:
                await talk.say()
        assert counts(engines) == (6, 4, {"none": 2})
        assert all("one" not in repr(turn.owner) for turn in engines.store._turns.values())

    talking(test, api_keys=("one", "two"), engine_api_key=None)


@pytest.mark.parametrize("keys", [("", ""), ("Bearer one", "Basic two"), ("Basic one", "Basic two")])
def test_keys_that_only_engines_know_are_tenants_too(keys: tuple[str, str]) -> None:
    async def test(engines: Bidirectional) -> None:
        for key in keys:
            await Talk(engines.made, key=key or None).say()
        assert counts(engines)[1] == (1 if keys[0] == keys[1] else 0)

    talking(test)


def test_another_model_in_the_same_conversation_is_another_cache() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        talk.said["model"] = "an adapter"
        await talk.say()
        assert counts(engines) == (2, 0, {"none": 2})

    talking(test)


def test_edited_history_is_the_engines_to_compare_and_the_ticket_is_used_up_all_the_same() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say("Tell me of cats. ")
        talk.history[0] = "Tell me of dogs. "
        await talk.say()
        assert engines.pulled == ["Tell me of "]
        assert counts(engines) == (2, 1, {"none": 1})

    talking(test)


def test_a_turn_is_not_used_once_its_time_is_over() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        engines.clock.now += 449
        await talk.say()
        engines.clock.now += 450
        await talk.say()
        assert counts(engines) == (3, 1, {"none": 1, "expired": 1})

    talking(test)


def test_the_time_and_number_of_turns_are_the_settings() -> None:
    async def test(engines: Bidirectional) -> None:
        talks = [Talk(engines.made, conversation=name) for name in "abc"]
        for talk in talks:
            await talk.say()
        assert engines.store.dropped == {Why.EVICTED: 1}
        engines.clock.now += 5
        await talks[2].say()
        assert counts(engines) == (4, 0, {"none": 3, "expired": 1})

    talking(test, turn_ttl_seconds=5.0, max_turns=2)


def together(number: int, answer: Handler) -> Handler:
    """*answer*, once *number* of requests have come."""
    come, free = 0, asyncio.Event()

    async def wait(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        nonlocal come
        come += 1
        if come == number:
            free.set()
        await free.wait()
        return await answer(engine, request, body)

    return wait


def test_a_newer_answer_takes_the_place_of_an_older_one() -> None:
    async def test(engines: Bidirectional) -> None:
        engines.made.prefill[0].answer = together(2, engines.prefill)
        talks = [Talk(engines.made), Talk(engines.made)]
        await asyncio.gather(*(talk.say() for talk in talks))
        assert engines.store.dropped == {Why.REPLACED: 1}
        await talks[0].say()
        assert counts(engines)[1] == 1

    talking(test)


def test_of_many_requests_at_once_one_gets_the_turn() -> None:
    async def test(engines: Bidirectional) -> None:
        await Talk(engines.made).say()
        engines.made.prefill[0].answer = together(20, engines.prefill)
        await asyncio.gather(*(Talk(engines.made).say() for _ in range(20)))
        assert sum(engines.used_in(engines.made.prefill[0], place) for place in range(21)) == 1
        assert counts(engines)[1:] == (1, {"none": 20})

    talking(test)


def test_a_turn_of_a_decode_server_that_is_gone_is_not_used() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        gone = engines.made.proxy.fleet.pools["decode"][0]
        server = engines.made.decode[0].server
        assert server is not None
        await server.close()
        await until(lambda: not gone.usable)
        await talk.say()
        assert counts(engines) == (2, 0, {"none": 1, "decode_gone": 1})

    talking(test, decode=2, probe_interval_seconds=0.05)


def test_a_turn_of_a_decode_server_that_has_been_restarted_is_not_used() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        instance, engine = engines.made.proxy.fleet.pools["decode"][0], engines.made.decode[0]
        port = engine.endpoint.port
        assert engine.server is not None
        await engine.server.close()
        await until(lambda: not instance.usable)
        engines.boots += 1
        await engine.start_on(port)
        await until(lambda: instance.usable)
        await talk.say()
        assert counts(engines) == (2, 0, {"none": 1, "engine_restarted": 1})
        await talk.say()
        assert counts(engines) == (3, 1, {"none": 1, "engine_restarted": 1})
        await engine.server.close()

    talking(test, probe_interval_seconds=0.05)


@pytest.mark.parametrize("status", [400, 500, 503, 200])
def test_a_prefill_server_that_refuses_a_turn_is_asked_again_without(status: int) -> None:
    async def test(engines: Bidirectional) -> None:
        async def refuse(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if engines.used_in(engine):
                error = {"error": {"message": "cannot pull from remote_host 10.9.8.7"}}
                failed = {"choices": [{"text": "", "finish_reason": "error"}]}
                return web.json_response(failed if status == 200 else error, status=status)
            return await engines.prefill(engine, request, body)

        talk = Talk(engines.made)
        await talk.say()
        engines.made.prefill[0].answer = refuse
        await talk.say()
        assert len(engines.made.prefill[0].bodies) == 3
        assert counts(engines) == (2, 1, {"none": 1, "refused": 1})
        assert len(engines.made.ledger.pulled) == 2

    talking(test)


def test_a_prefill_server_that_refuses_twice_has_refused_the_request() -> None:
    async def test(engines: Bidirectional) -> None:
        async def refuse(*_: Any) -> web.StreamResponse:
            return web.json_response({"error": {"message": "no"}}, status=500)

        talk = Talk(engines.made)
        await talk.say()
        engines.made.prefill[0].answer = refuse
        await talk.say(status=500)
        assert len(engines.made.prefill[0].bodies) == 3
        assert len(engines.store) == 0

    talking(test)


def test_a_prefill_server_that_breaks_off_on_a_turn_is_asked_again_without() -> None:
    async def test(engines: Bidirectional) -> None:
        async def hang_up(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if engines.used_in(engine):
                assert request.transport is not None
                request.transport.abort()
            return await engines.prefill(engine, request, {**body, "kv_transfer_params": {**plain}})

        plain = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
        talk = Talk(engines.made)
        await talk.say()
        engines.made.prefill[0].answer = hang_up
        await talk.say()
        assert counts(engines) == (2, 1, {"none": 1, "refused": 1})

    talking(test)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": "a", "echo": True, "max_tokens": 0},
        {"prompt": "a", "echo": True, "logprobs": 1},
        {"prompt": "a", "prompt_logprobs": 1},
    ],
)
def test_a_request_that_cannot_use_a_turn_leaves_it_where_it_is(body: dict[str, Any]) -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        async with engines.made.post({**body, "model": "m", "conversation_id": "talk"}) as response:
            assert response.status == 200
            assert b"remote_" not in await response.read()
        for engine in (*engines.made.prefill, *engines.made.decode):
            assert all(b"conversation_id" not in raw for raw in engine.raws)
        assert all(not sent["kv_transfer_params"]["keep_blocks"] for sent in engines.made.decode[0].bodies[1:])
        await talk.say()
        assert counts(engines) == (2, 1, {"none": 1})

    talking(test)


@pytest.mark.parametrize("streamed", [False, True])
def test_without_a_conversation_nothing_is_kept_and_the_decode_server_is_told(streamed: bool) -> None:
    async def test(engines: Bidirectional) -> None:
        for named in (None, ""):
            await Talk(engines.made, streamed=streamed, conversation=named).say()
        assert [body["kv_transfer_params"]["keep_blocks"] for body in engines.made.decode[0].bodies] == [False, False]
        assert counts(engines) == (0, 0, {})

    talking(test)


def test_with_turns_off_the_conversation_reaches_no_engine_and_no_block_is_kept() -> None:
    async def test(made: House) -> None:
        engines = Bidirectional(made)
        await Talk(made, said={"conversation_id": 5}, conversation=None).say()
        await Talk(made, conversation="x" * 10_000).say()
        for engine in (*made.prefill, *made.decode):
            assert all("conversation_id" not in body for body in engine.bodies)
        assert not engines.blocks
        status, text = await made.get("/metrics")
        assert status == 200 and "turns" not in text

    with_house(test)


@pytest.mark.parametrize(
    ("header", "field", "said"),
    [
        ("a", "b", "name different conversations"),
        ("x" * 257, None, "X-Session-ID has 257 bytes: at most 256"),
        (None, "x" * 257, "conversation_id has 257 bytes: at most 256"),
        (None, "\u00e9" * 129, "conversation_id has 258 bytes"),
        (None, "x" * 100_000, "conversation_id has 100000 bytes"),
        (None, 5, "conversation_id must be a text, not int"),
        (None, {"a": 1}, "conversation_id must be a text, not dict"),
    ],
)
def test_a_bad_name_of_a_conversation_is_refused_and_reaches_no_engine(
    header: str | None, field: Any, said: str
) -> None:
    async def test(engines: Bidirectional) -> None:
        headers = {} if header is None else {"X-Session-ID": header}
        body = {"prompt": "a"} if field is None else {"prompt": "a", "conversation_id": field}
        async with engines.made.post(body, headers=headers) as response:
            assert response.status == 400
            error = (await response.json())["error"]
        assert said in error["message"] and error["param"] == "conversation_id"
        assert engines.made.prefill[0].bodies == []

    talking(test)


@pytest.mark.parametrize(("header", "field"), [("a", "a"), ("", "a"), ("a", None), ("x" * 256, None)])
def test_header_and_field_may_say_the_same(header: str, field: str | None) -> None:
    async def test(engines: Bidirectional) -> None:
        for _ in range(2):
            body = {"prompt": "a", "conversation_id": field}
            async with engines.made.post(body, headers={"X-Session-ID": header}) as response:
                assert response.status == 200
        assert counts(engines) == (2, 1, {"none": 1})

    talking(test)


def cut_streams(engines: Bidirectional, kind: str) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Answers that carry a ticket and are not whole."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        ticket = engines.give(engine, request, "")
        events = pieces(request.path, "answer 1. ", ticket, "finish")
        if kind == "failed":
            events[-2] = events[-2].replace(b'"stop"', b'"error"')
        if kind == "error event":
            events[-1] = b'data: {"error": {"message": "broken"}}\n\n'
        if kind in ("cut", "ends early"):
            events = events[:-1]
        response = await stream(request, events)
        if kind == "cut":
            assert request.transport is not None
            request.transport.abort()
        return response

    return answer


@pytest.mark.parametrize("kind", ["cut", "ends early", "failed", "error event"])
def test_a_stream_that_is_not_whole_keeps_no_turn(kind: str) -> None:
    async def test(engines: Bidirectional) -> None:
        engines.made.decode[0].answer = cut_streams(engines, kind)
        body = {"prompt": "a", "stream": True, "conversation_id": "talk"}
        async with engines.made.post(body) as response:
            raw = await response.read()
        assert b"[DONE]" not in raw and b"remote_" not in raw
        assert counts(engines) == (0, 0, {"none": 1})

    talking(test)


@pytest.mark.parametrize("place", ["finish", "on top"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_that_failed_in_its_own_words_keeps_no_turn(streamed: bool, place: str) -> None:
    async def test(engines: Bidirectional) -> None:
        async def fail(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            ticket = engines.give(engine, request, "")
            if not streamed:
                answer = {**whole(RESPONSES, "answer 1. "), "status": "failed", "kv_transfer_params": ticket}
                return web.json_response(answer)
            events = pieces(RESPONSES, "answer 1. ", ticket, place)
            events[-1] = events[-1].replace(b"completed", b"failed")
            return await stream(request, events)

        engines.made.decode[0].answer = fail
        await Talk(engines.made, RESPONSES, streamed).say()
        assert counts(engines) == (0, 0, {"none": 1})

    talking(test)


@pytest.mark.parametrize("status", [400, 500, 200])
def test_an_answer_that_failed_keeps_no_turn(status: int) -> None:
    async def test(engines: Bidirectional) -> None:
        async def fail(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            answer = {"choices": [{"text": "", "finish_reason": "error"}]}
            ticket = engines.give(engine, request, "")
            return web.json_response({**answer, "kv_transfer_params": ticket}, status=status)

        engines.made.decode[0].answer = fail
        async with engines.made.post({"prompt": "a", "conversation_id": "talk"}) as response:
            assert response.status == (502 if status == 200 else status)
        assert counts(engines) == (0, 0, {"none": 1})

    talking(test)


def test_a_client_that_leaves_keeps_no_turn() -> None:
    async def test(engines: Bidirectional) -> None:
        async def no_end(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            ticket = engines.give(engine, request, "")
            await stream(request, pieces(COMPLETIONS, "answer 1. ", ticket, "finish")[:-1])
            return await hang()

        engines.made.decode[0].answer = no_end
        response = await engines.made.post({"prompt": "a", "stream": True, "conversation_id": "talk"}).__aenter__()
        await response.content.readuntil(b"stop")
        response.close()
        await until(lambda: engines.made.decode[0].gone == 1)
        assert counts(engines) == (0, 0, {"none": 1})

    talking(test)


def test_a_client_that_leaves_after_the_last_event_has_its_turn() -> None:
    """Some close the connection at [DONE]; and the next request may be here before the engine's last byte."""

    async def test(engines: Bidirectional) -> None:
        async def no_last_byte(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            ticket = engines.give(engine, request, "")
            await stream(request, pieces(COMPLETIONS, "answer 1. ", ticket, "finish"))
            return await hang()

        engines.made.decode[0].answer = no_last_byte
        response = await engines.made.post(
            {"prompt": "a", "model": "m", "stream": True, "conversation_id": "talk"}
        ).__aenter__()
        await response.content.readuntil(b"[DONE]")
        assert counts(engines) == (1, 0, {"none": 1})
        engines.made.decode[0].answer = engines.decode
        await Talk(engines.made).say()
        assert counts(engines) == (2, 1, {"none": 1})
        response.close()
        await until(lambda: engines.made.decode[0].gone == 1)

    talking(test)


def test_a_slow_readers_turn_expires_from_when_its_answer_was_held_back() -> None:
    """The decode server may have been done since then, and its blocks go by its own clock."""

    async def test(engines: Bidirectional) -> None:
        written = 0

        async def long(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            nonlocal written
            response = await stream(request, [])
            for _ in range(64):
                await response.write(b'data: {"choices": [{"text": "%b"}]}\n\n' % (b"x" * (1 << 20)))
                written += 1
            ticket = engines.give(engine, request, "")
            for piece in pieces(COMPLETIONS, "answer 1. ", ticket, "finish"):
                await response.write(piece)
            return response

        engines.made.decode[0].answer = long
        body = {"prompt": "a", "model": "m", "stream": True, "conversation_id": "talk"}
        response = await engines.made.post(body).__aenter__()
        assert await settled(lambda: written) < 64
        engines.clock.now += 300
        assert b"[DONE]" in await response.read()
        engines.made.decode[0].answer = engines.decode
        engines.clock.now += 149
        assert len(engines.store) == 1
        (kept,) = engines.store._turns.values()
        assert kept.expires_at == engines.clock.now + 1

    talking(test)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_may_hold_a_ticket_in_place_of_a_name(path: str, streamed: bool) -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made, path, streamed, conversation=None)
        await talk.say()
        for _ in range(4):
            before = talk.echoed
            await talk.echo()
            assert talk.echoed.keys() == {"ticket"} and talk.echoed != before
        assert counts(engines) == (5, 4, {}) and not engines.store.ignored
        assert len(engines.pulled) == 4
        for engine in (*engines.made.prefill, *engines.made.decode):
            assert all(b"ticket" not in raw for raw in engine.raws)

    talking(test, client_tickets=True, decode=2)


@pytest.mark.parametrize("place", ["finish", "usage", "alone"])
def test_a_clients_ticket_stands_where_the_engines_stood(place: str) -> None:
    async def test(engines: Bidirectional) -> None:
        engines.place = place
        talk = Talk(engines.made, streamed=True, conversation=None)
        await talk.say()
        await talk.echo()
        assert counts(engines) == (2, 1, {})

    talking(test, client_tickets=True)


def tampered(text: str) -> str:
    return text[:20] + ("A" if text[20] != "A" else "B") + text[21:]


@pytest.mark.parametrize("why", ["forged", "foreign", "foreign model", "expired", "used", "gone"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_ticket_that_is_not_good_is_ignored_and_counted(why: str, streamed: bool) -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made, streamed=streamed, conversation=None, key="Bearer one")
        await talk.say()
        used = 0
        match why:
            case "forged":
                talk.echoed = {"ticket": tampered(talk.echoed["ticket"])}
            case "foreign":
                talk.key = "Bearer two"
            case "foreign model":
                talk.said["model"] = "another"
            case "expired":
                engines.clock.now += 450
            case "used":
                first, used = talk.echoed, 1
                await talk.echo()
                talk.echoed = first
            case "gone":
                engines.made.proxy.fleet.pools["decode"][0].outages += 1
        await talk.echo()
        assert not engines.used_in(engines.made.prefill[0])
        reason = {"foreign model": "foreign", "gone": "engine_restarted"}.get(why, why)
        assert engines.store.ignored == {reason: 1}
        assert counts(engines)[1] == used

    talking(test, client_tickets=True)


def test_a_foreign_ticket_stays_good_for_its_owner() -> None:
    async def test(engines: Bidirectional) -> None:
        mine = Talk(engines.made, conversation=None, key="Bearer one")
        await mine.say()
        thief = Talk(engines.made, conversation=None, key="Bearer two", echoed=mine.echoed)
        await thief.echo()
        await mine.echo()
        assert engines.store.ignored == {"foreign": 1} and engines.store.used == 1

    talking(test, client_tickets=True)


def test_a_ticket_replayed_at_once_is_used_once() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made, conversation=None)
        await talk.say()
        engines.made.prefill[0].answer = together(10, engines.prefill)
        await asyncio.gather(*(Talk(engines.made, conversation=None, echoed=talk.echoed).echo() for _ in range(10)))
        assert engines.store.ignored == {"used": 9} and engines.store.used == 1

    talking(test, client_tickets=True)


def test_a_bad_ticket_beside_a_good_name_leaves_the_name() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        await talk.say()
        talk.echoed = {"ticket": "x"}
        await talk.echo()
        assert engines.store.ignored == {"forged": 1} and counts(engines) == (2, 1, {"none": 1})
        await talk.echo()
        assert counts(engines) == (3, 2, {"none": 1})

    talking(test, client_tickets=True)


STOLEN = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_block_ids": [[0]],
    "remote_engine_id": "evil",
    "remote_request_id": "evil",
    "remote_host": "evil",
    "remote_port": 1,
    "keep_blocks": True,
}


@pytest.mark.parametrize("client_tickets", [False, True])
@pytest.mark.parametrize("conversation", [None, "talk"])
@pytest.mark.parametrize(
    "sent", [STOLEN, {**STOLEN, "ticket": "evil"}, {"ticket": STOLEN}, {"ticket": ["evil"]}, "evil", ["evil"], 5]
)
def test_nothing_that_a_client_says_of_the_transfer_reaches_an_engine(
    client_tickets: bool, conversation: str | None, sent: Any
) -> None:
    async def test(engines: Bidirectional) -> None:
        said = {"kv_transfer_params": sent, "vllm_xargs": {"kv_transfer_params": sent}, "ec_transfer_params": sent}
        await Talk(engines.made, conversation=conversation, said=said).say()
        (asked,) = engines.made.prefill[0].bodies
        assert asked["kv_transfer_params"]["remote_block_ids"] is None
        for engine in (*engines.made.prefill, *engines.made.decode):
            assert all(b"evil" not in raw for raw in engine.raws)

    talking(test, client_tickets=client_tickets)


def test_what_is_counted_is_in_the_metrics() -> None:
    async def test(engines: Bidirectional) -> None:
        talk = Talk(engines.made)
        for _ in range(3):
            await talk.say()
        engines.clock.now += 450
        talk.echoed = {"ticket": "x"}
        await talk.echo()
        _, text = await engines.made.get("/metrics")
        for line in (
            "baton_turns_kept_total 4.0",
            "baton_turns_used_total 2.0",
            'baton_turns_missed_total{reason="none"} 1.0',
            'baton_turns_missed_total{reason="expired"} 1.0',
            'baton_turns_dropped_total{reason="expired"} 1.0',
            'baton_client_tickets_ignored_total{reason="forged"} 1.0',
            "baton_turns_stored 1.0",
        ):
            assert line in text.splitlines()

    talking(test, client_tickets=True)


@pytest.mark.parametrize("wrong", ["foreign", "used", "expired", "restarted"])
def test_the_fakes_would_see_a_wrong_pull(wrong: str) -> None:
    """What the tests above rest on."""

    async def test(made: House) -> None:
        engines = Bidirectional(made)
        decode, prefill = made.decode[0], made.prefill[0]
        headers = {"Authorization": "Bearer one"}
        params = {**engines_ask(), "do_remote_prefill": True, "keep_blocks": True}
        decode_url = f"http://127.0.0.1:{decode.endpoint.port}{COMPLETIONS}"
        async with made.client.post(
            decode_url, json={"prompt": "a", "kv_transfer_params": params}, headers=headers
        ) as response:
            ticket = (await response.json())["kv_transfer_params"]
        prefill_url = f"http://127.0.0.1:{prefill.endpoint.port}{COMPLETIONS}"
        if wrong == "foreign":
            headers = {"Authorization": "Bearer two"}
        if wrong == "expired":
            engines.clock.now += 480
        if wrong == "restarted":
            engines.boots += 1
        for _ in range(2 if wrong == "used" else 1):
            async with made.client.post(
                prefill_url, json={"prompt": "a", "kv_transfer_params": ticket}, headers=headers
            ) as response:
                assert response.status == 200
        assert len(made.ledger.poison) == 1
        made.ledger.poison.clear()

    with_house(test)


def engines_ask() -> dict[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}
