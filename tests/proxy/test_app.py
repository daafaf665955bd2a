"""The proxy as a client sees it, over real sockets to fake engines."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from baton.cluster import Endpoint, Role
from baton.proxy import Proxy, ProxySettings
from tests.proxy.fakes import TOKENS, FakeEngine, House, hang, stream, until, with_house

TEXT = "".join(TOKENS)


def test_a_request_goes_through_both_phases() -> None:
    async def test(made: House) -> None:
        async with made.post({"model": "m", "prompt": "a", "max_tokens": 9}) as response:
            assert response.status == 200
            assert (await response.json())["choices"][0]["text"] == TEXT
            assert response.headers["x-baton-prefill"] == "P0"
            assert response.headers["x-baton-decode"] == "D0"
        assert made.prefill[0].bodies[0]["max_tokens"] == 1
        assert made.decode[0].bodies[0] == {
            "model": "m",
            "prompt": "a",
            "max_tokens": 9,
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "remote_engine_id": "p",
                "remote_block_ids": [[0]],
                "keep_blocks": False,
            },
        }

    with_house(test)


def test_a_stream_arrives_whole_and_as_a_stream() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            raw = await response.read()
        events = [line[6:] for line in raw.decode().split("\n\n") if line]
        assert "".join(json.loads(each)["choices"][0]["text"] for each in events[:-1]) == TEXT
        assert events[-1] == "[DONE]"

    with_house(test)


def test_the_stream_passes_at_once() -> None:
    async def test(made: House) -> None:
        first_seen = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            async with asyncio.timeout(10):
                await first_seen.wait()  # the rest comes only after the client has the first piece
            await response.write(b"data: [DONE]\n\n")
            return response

        made.decode[0].answer = slow
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            first_seen.set()
            assert await response.read() == b"data: [DONE]\n\n"

    with_house(test)


def test_both_legs_carry_one_request_id_and_the_client_gets_its_own_back() -> None:
    async def test(made: House) -> None:
        sent = {"X-Request-Id": "mine", "Authorization": "Bearer k", "traceparent": "00-a-b-01", "Cookie": "no"}
        async with made.post({"prompt": "a"}, headers=sent) as response:
            assert response.headers["X-Request-Id"] == "mine"
        prefill, decode = made.prefill[0].headers[0], made.decode[0].headers[0]
        assert prefill["x-request-id"] == decode["x-request-id"] != "mine"
        for headers in (prefill, decode):
            assert headers["authorization"] == "Bearer k"
            assert headers["traceparent"] == "00-a-b-01"
            assert "cookie" not in headers

    with_house(test)


def test_two_requests_with_one_id_of_the_clients_are_told_apart() -> None:
    async def test(made: House) -> None:
        for _ in range(2):
            async with made.post({"prompt": "a"}, headers={"X-Request-Id": "same"}):
                pass
        first, second = (each["x-request-id"] for each in made.prefill[0].headers)
        assert first != second

    with_house(test)


def test_pools_are_round_robined_independently() -> None:
    async def test(made: House) -> None:
        pairs = []
        for _ in range(6):
            async with made.post({"prompt": "a"}) as response:
                pairs.append(response.headers["x-baton-prefill"] + response.headers["x-baton-decode"])
        assert pairs == ["P0D0", "P1D1", "P0D2", "P1D0", "P0D1", "P1D2"]

    with_house(test, prefill=2, decode=3)


@pytest.mark.parametrize("refuser", ["prefill", "decode"])
@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engines_refusal_arrives_with_its_own_status_and_body(refuser: str, status: int, stream: bool) -> None:
    async def test(made: House) -> None:
        async def refuse(*_: Any) -> web.StreamResponse:
            return web.Response(
                status=status, body=b'{"error": {"message": "as it was"}}', content_type="application/json"
            )

        getattr(made, refuser)[0].answer = refuse
        async with made.post({"prompt": "a", "stream": stream}) as response:
            assert response.status == status
            assert await response.read() == b'{"error": {"message": "as it was"}}'
            assert response.content_type == "application/json"
        if refuser == "prefill":
            assert made.decode[0].bodies == []
        # the engine is not blamed for it
        async with made.client.get(f"{made.url}/health") as health:
            assert health.status == 200

    with_house(test)


async def cut(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("breaker", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_engine_that_hangs_up_before_its_head_is_a_502(breaker: str, stream: bool) -> None:
    async def test(made: House) -> None:
        getattr(made, breaker)[0].answer = cut
        async with made.post({"prompt": "a", "stream": stream}) as response:
            assert response.status == 502
            assert (await response.json())["error"]["message"] == f"the {breaker} server broke off its answer"

    with_house(test)


def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done() -> None:
    async def test(made: House) -> None:
        async def half(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request, [b'data: {"choices": [{"te'])
            assert request.transport is not None
            request.transport.abort()
            return response

        made.decode[0].answer = half
        async with made.post({"prompt": "a", "stream": True}) as response:
            raw = await response.read()
        assert b"[DONE]" not in raw
        (event,) = [event for event in raw.split(b"\n\n") if event]  # nothing of the half one
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == 502

    with_house(test)


def test_a_prefill_without_ticket_is_counted_and_decode_computes_the_prompt() -> None:
    async def test(made: House) -> None:
        async def no_ticket(*_: Any) -> web.StreamResponse:
            return web.json_response({"choices": [], "kv_transfer_params": None})

        made.prefill[0].answer = no_ticket
        async with made.post({"prompt": "a", "kv_transfer_params": {"remote_host": "evil"}}) as response:
            assert response.status == 200
        assert made.decode[0].bodies == [{"prompt": "a"}]
        async with made.client.get(f"{made.url}/metrics") as metrics:
            text = await metrics.text()
        assert "baton_prefill_without_ticket_total 1.0" in text
        assert "baton_handed_off_total 0.0" in text

    with_house(test)


def test_a_decode_servers_ticket_does_not_reach_the_client() -> None:
    async def test(made: House) -> None:
        async def with_ticket(*_: Any) -> web.StreamResponse:
            return web.json_response({"choices": [1], "kv_transfer_params": {"remote_host": "10.0.0.1"}})

        made.decode[0].answer = with_ticket
        async with made.post({"prompt": "a"}) as response:
            assert await response.json() == {"choices": [1]}

    with_house(test)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "stream"])
def test_a_client_that_leaves_aborts_the_leg_and_leaves_nothing_behind(phase: str, streaming: bool) -> None:
    async def test(made: House) -> None:
        async def begin(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            if streaming:
                await stream(request, [b"data: 1\n\n"])
            return await hang()

        engine = made.prefill[0] if phase == "prefill" else made.decode[0]
        engine.answer = hang if phase != "stream" else begin
        fleet = made.proxy.fleet
        for count in range(1, 4):
            asking = asyncio.ensure_future(made.post({"prompt": "a", "stream": streaming}).__aenter__())
            await until(lambda count=count: len(engine.bodies) == count)  # type: ignore[misc]
            if phase == "stream" and streaming:
                await asking
                (await asking).close()
            else:
                asking.cancel()
            await until(lambda count=count: engine.gone == count)  # type: ignore[misc]
        await until(lambda: all(instance.in_flight == 0 for instance in fleet))
        engine.answer = None
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 200
        # what prefill gave was taken by the decode server, which frees it, every time
        assert made.ledger.held == set()
        assert len(made.ledger.pulled) == (1 if phase == "prefill" else 4)

    with_house(test)


def test_a_client_that_leaves_between_the_legs_has_its_ticket_taken_all_the_same() -> None:
    async def test(made: House) -> None:
        pool = made.proxy.way.upstream._pools["D0"]
        free, connect, waiting = asyncio.Event(), pool.connect, []

        async def slow() -> Any:
            waiting.append(1)
            await free.wait()
            return await connect()

        pool.sweep()
        pool.connect = slow  # type: ignore[method-assign]
        pool.take = lambda: None  # type: ignore[method-assign]
        asking = asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__())
        await until(lambda: len(waiting) == 1)
        assert made.ledger.held == {0}
        asking.cancel()
        await until(lambda: len(waiting) == 2)
        free.set()
        await until(lambda: made.ledger.pulled == [0])

    with_house(test)


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"[]", {}, 400),
        (b'"text"', {}, 400),
        (b'{"prompt": "\xff"}', {}, 400),
        (b'{"prompt": "\\ud800"}', {}, 400),
        (b'{"prompt": ["a", 1]}', {}, 400),
        (b'{"prompt": ' + b"[" * 300 + b"]" * 300 + b"}", {}, 400),
        (b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}", {}, 400),
        (b'{"prompt": "a", "n": 0}', {}, 400),
        (b'{"prompt": "a", "n": "2"}', {}, 400),
        (b"{}", {"Content-Encoding": "gzip"}, 415),
        (b"x" * ((64 << 20) + 1), {}, 413),
    ],
)
def test_a_bad_body_is_refused_in_openais_shape_and_reaches_no_engine(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    async def test(made: House) -> None:
        async with made.client.post(f"{made.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
        assert made.prefill[0].bodies == []
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 200

    with_house(test)


def test_a_large_body_passes_unchanged() -> None:
    async def test(made: House) -> None:
        messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a" * (16 << 20)}}]}]
        async with made.post({"messages": messages}, path="/v1/chat/completions") as response:
            assert response.status == 200
        assert made.prefill[0].bodies[0]["messages"] == messages
        assert made.decode[0].bodies[0]["messages"] == messages

    with_house(test)


def test_no_engine_up_is_503_at_once_and_comes_back_by_itself() -> None:
    async def go() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
            dead = Endpoint(role=Role.DECODE, host="127.0.0.1", port=closed.getsockname()[1])
            engine = FakeEngine(Role.PREFILL)
            await engine.start()
            proxy = Proxy(ProxySettings(host="127.0.0.1", port=0, endpoints=(engine.endpoint, dead)))
            ((_, bound),) = await proxy.start()
            url = f"http://127.0.0.1:{bound}"
            async with aiohttp.ClientSession() as client:
                async with client.post(f"{url}/v1/completions", json={"prompt": "a"}) as response:
                    assert response.status == 503
                    assert response.headers["Retry-After"] == "1"
                    assert "no decode server is usable" in (await response.json())["error"]["message"]
                assert engine.bodies == []
                async with client.get(f"{url}/health") as health:
                    assert health.status == 503
                    assert (await health.json())["decode"] == {"usable": 0, "known": 1}
                async with client.get(f"{url}/healthcheck") as check:
                    assert await check.json() == {"status": "ok", "prefill_instances": 1, "decode_instances": 1}
                port = dead.port
                closed.close()
                late = FakeEngine(Role.DECODE)
                await late.start_on(port)
                await until(proxy.fleet.ready)
                async with client.post(f"{url}/v1/completions", json={"prompt": "a"}) as response:
                    assert response.status == 200
            await proxy.stop(0.0)
            assert engine.server is not None and late.server is not None
            await engine.server.close()
            await late.server.close()

    asyncio.run(go())


def test_models_come_from_an_engine_and_unknown_paths_are_404() -> None:
    async def test(made: House) -> None:
        async with made.client.get(f"{made.url}/v1/models") as response:
            assert (await response.json())["data"] == [{"id": "m"}]
        async with made.client.get(f"{made.url}/nothing") as response:
            assert response.status == 404
            assert (await response.json())["error"]["message"] == "there is nothing at /nothing"
        async with made.client.get(f"{made.url}/v1/completions") as response:
            assert response.status == 405
            assert (await response.json())["error"]["type"] == "invalid_request_error"
        async with made.client.get(f"{made.url}/instances") as response:
            assert [each["id"] for each in (await response.json())["instances"]] == ["P0", "D0"]

    with_house(test)


def test_metrics_count_requests_by_status() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}):
            pass
        async with made.client.get(f"{made.url}/metrics") as response:
            text = await response.text()
        assert 'baton_requests_total{endpoint="/v1/completions",status="200"} 1.0' in text
        assert "baton_handed_off_total 1.0" in text
        assert "baton_prefill_seconds_count 1.0" in text
        assert 'baton_instance_usable{instance="127.0.0.1:' in text

    with_house(test)


def test_a_connection_to_an_engine_is_used_again() -> None:
    async def test(made: House) -> None:
        ports = set()

        async def note(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            from tests.proxy.fakes import prefill_answer

            assert request.transport is not None
            ports.add(request.transport.get_extra_info("peername")[1])
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = note
        for _ in range(20):
            async with made.post({"prompt": "a"}) as response:
                await response.read()
        assert len(ports) == 1

    with_house(test)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_leg_that_takes_too_long_is_a_504_and_is_aborted(phase: str) -> None:
    async def test(made: House) -> None:
        engine = getattr(made, phase)[0]
        engine.answer = hang
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 504
            assert (await response.json())["error"]["message"] == f"the {phase} server took too long"
        await until(lambda: engine.gone == 1)
        assert all(instance.in_flight == 0 for instance in made.proxy.fleet)

    with_house(test, request_timeout_seconds=0.2)
