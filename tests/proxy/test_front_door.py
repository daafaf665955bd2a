"""What a front door has besides the way through the phases: keys, origins, caps, logs, and what just passes."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.http import Request
from baton.proxy.access_log import AccessLog
from baton.proxy.door import Keys, Origins, carried, check_rank, read_keys
from baton.proxy.errors import ProxyError
from tests.proxy.fakes import PASSED, PATHS, FakeEngine, House, hang, prefill_answer, stream, until, with_house
from tests.proxy.push_fakes import about


def asked(method: str = "POST", path: bytes = b"/v1/completions", **headers: str) -> Request:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request(method, path, pairs, http_1_0=False, keep_alive=True)


# keys


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({}, False),
        ({"authorization": "Bearer one"}, True),
        ({"authorization": "bearer two"}, True),
        ({"authorization": "Bearer  two "}, True),
        ({"authorization": "Bearer tw"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": "Basic one"}, False),
        ({"authorization": "one"}, False),
        ({"x_api_key": "one"}, True),
        ({"x_api_key": "three"}, False),
    ],
)
def test_a_key_is_known_or_not(headers: dict[str, str], known: bool) -> None:
    assert Keys(["one", "two"]).know(asked(**headers)) is known


def test_keys_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# who\n one \n\ntwo\n")
    assert read_keys(path) == ["one", "two"]
    path.write_text("# nobody\n")
    with pytest.raises(ValueError, match="no key in"):
        read_keys(path)


@pytest.mark.parametrize("path", [*PATHS, *PASSED, "/v1/models", "/nothing"])
def test_without_a_key_nothing_is_answered_and_no_engine_asked(path: str) -> None:
    async def test(made: House) -> None:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            async with made.post({"prompt": "a"}, path=path, headers=headers) as response:
                assert response.status == 401
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert error["type"] == "authentication_error"
        assert made.prefill[0].paths == made.decode[0].paths == []

    with_house(test, api_keys=("right", "also right"))


def test_with_any_of_the_keys_all_is_well() -> None:
    async def test(made: House) -> None:
        for key in ("right", "also right"):
            async with made.post({"prompt": "a"}, headers={"Authorization": f"Bearer {key}"}) as response:
                assert response.status == 200

    with_house(test, api_keys=("right", "also right"))


@pytest.mark.parametrize("path", ["/health", "/healthcheck", "/liveness", "/readiness", "/metrics"])
def test_probes_and_scrapers_need_no_key(path: str) -> None:
    async def test(made: House) -> None:
        assert (await made.get(path))[0] == 200

    with_house(test, api_keys=("k",), admin_key="a")


def test_the_instances_need_the_admin_key_once_there_is_one() -> None:
    async def test(made: House) -> None:
        for key, status in (("user", 401), ("admin", 200)):
            assert (await made.get("/instances", headers={"Authorization": f"Bearer {key}"}))[0] == status
        assert (await made.get("/instances"))[0] == 401
        async with made.post({"prompt": "a"}, headers={"Authorization": "Bearer admin"}) as response:
            assert response.status == 401

    with_house(test, api_keys=("user",), admin_key="admin")


@pytest.mark.parametrize("client", [None, "theirs"])
@pytest.mark.parametrize("engines", [None, "ours"])
def test_the_clients_key_goes_before_the_engines_and_none_is_made_up(client: str | None, engines: str | None) -> None:
    async def test(made: House) -> None:
        headers = {} if client is None else {"Authorization": f"Bearer {client}"}
        async with made.post({"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        await made.get("/v1/models", headers=headers)
        wanted = client or engines
        for engine in (*made.prefill, *made.decode):
            for seen in engine.headers:
                assert seen.get("authorization") == (None if wanted is None else f"Bearer {wanted}")

    with_house(test, engine_api_key=engines)


def test_a_key_of_the_proxys_own_does_not_reach_engines_that_have_another() -> None:
    request = asked(authorization="Bearer proxy", traceparent="t")
    assert carried(request, b"engine", own_keys=True) == [
        (b"traceparent", b"t"),
        (b"authorization", b"Bearer engine"),
    ]
    assert carried(asked(x_api_key="k"), None, own_keys=False) == [(b"authorization", b"Bearer k")]


# the rank that decodes


@pytest.mark.parametrize("path", PATHS)
def test_the_rank_that_a_client_names_is_told_to_decode_alone(path: str) -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, path=path, headers={"X-Data-Parallel-Rank": "1"}) as response:
            assert response.status == 200
        assert [seen.get("x-data-parallel-rank") for seen in made.decode[0].headers] == ["1"]
        assert [seen.get("x-data-parallel-rank") for seen in made.prefill[0].headers] == [None]

    with_house(test)


def test_every_sample_of_a_request_decodes_on_the_rank_that_was_named() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a", "n": 2}, headers={"X-data-parallel-rank": "0"}) as response:
            assert response.status == 200
        assert [seen.get("x-data-parallel-rank") for seen in made.decode[0].headers] == ["0", "0"]

    with_house(test)


@pytest.mark.parametrize("rank", ["one", "-1", "+1", "1.0", "1_0", "0x1", "1,0", ""])
def test_a_rank_that_is_no_number_is_refused_before_any_engine_is_asked(rank: str) -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, headers={"X-data-parallel-rank": rank}) as response:
            assert response.status == 400
            assert repr(rank) in (await response.json())["error"]["message"]
        assert made.prefill[0].paths == made.decode[0].paths == []

    with_house(test)


@pytest.mark.parametrize(
    ("rank", "ranks", "good"),
    [("1", 2, True), ("0", 1, True), ("7", None, True), ("2", 2, False), ("1", 1, False), ("9" * 5000, 2, False)],
)
def test_a_rank_is_one_of_the_decode_servers(rank: str, ranks: int | None, good: bool) -> None:
    """How many a stock engine has nobody says: it is asked, and refuses by itself."""
    if good:
        check_rank([(b"x-data-parallel-rank", rank.encode())], ranks)
        return
    with pytest.raises(ProxyError) as error:
        check_rank([(b"a", b"b"), (b"x-data-parallel-rank", rank.encode())], ranks)
    assert error.value.status == 400
    assert rank[:40] in error.value.message
    assert ("2 ranks, 0 to 1" if ranks == 2 else "1 rank, 0") in error.value.message


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_rank_beyond_the_decode_servers_is_refused_before_any_engine_is_asked(mode: str) -> None:
    """Whatever would be computed for it stayed in a prefill server's memory for nothing."""

    def prepare(engines: list[FakeEngine]) -> None:
        for engine, role, count in zip(engines, ("kv_producer", "kv_consumer"), (1, 2), strict=True):
            engine.about = about(role, role, mode, dp_size=count)

    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, headers={"X-data-parallel-rank": "2"}) as response:
            assert response.status == 400
            said = (await response.json())["error"]["message"]
        assert said == "X-data-parallel-rank 2 is beyond the decode server's: it has 2 ranks, 0 to 1"
        assert made.prefill[0].paths == made.decode[0].paths == []

    with_house(test, prepare=prepare)


# web origins


@pytest.mark.parametrize(
    ("allowed", "origin", "told"),
    [
        (["https://a.example"], "https://a.example", "https://a.example"),
        (["https://a.example/"], "https://a.example", "https://a.example"),
        (["https://a.example"], "https://b.example", None),
        (["*"], "https://b.example", "*"),
        ([], "https://a.example", None),
    ],
)
def test_an_origin_is_told_whether_it_may_read(allowed: list[str], origin: str, told: str | None) -> None:
    headers = dict(Origins(allowed).headers(asked(origin=origin)))
    assert headers.get(b"access-control-allow-origin") == (None if told is None else told.encode())
    assert Origins(allowed).headers(asked()) == []


def test_a_page_may_ask_and_read_when_its_origin_is_allowed() -> None:
    async def test(made: House) -> None:
        page = {"Origin": "https://a.example"}
        question = {**page, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with made.client.options(f"{made.url}/v1/completions", headers=question) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        assert made.prefill[0].bodies == []
        key = {"Authorization": "Bearer k"}
        for headers in ({**page, **key}, page):  # an error must be readable too
            for body in ({"prompt": "a"}, {"prompt": "a", "stream": True}, []):
                async with made.post(body, headers=headers) as response:
                    assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
                    assert response.headers["Vary"] == "origin"
        async with made.post({"prompt": "a"}, headers={**key, "Origin": "https://b.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers

    with_house(test, cors_origins=("https://a.example",), api_keys=("k",))


def test_without_origins_nothing_is_said_of_them() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, headers={"Origin": "https://a.example"}) as response:
            assert not [name for name in response.headers if name.lower().startswith("access-control")]
        async with made.client.options(f"{made.url}/v1/completions") as response:
            assert response.status == 405

    with_house(test)


# caps


async def one_under_way_and_one_in_line(made: House, **second: Any) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """Two requests to a proxy with one place; the first is with a prefill server that hangs."""
    made.prefill[0].answer = hang
    gate = made.proxy.way.gate
    under_way = asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__())
    await until(lambda: gate.active == 1)
    in_line = asyncio.ensure_future(made.post({"prompt": "b", **second}).__aenter__())
    await until(lambda: gate.waiting == 1)
    return under_way, in_line


def test_more_requests_than_places_wait_and_more_than_that_are_429() -> None:
    async def test(made: House) -> None:
        gate = made.proxy.way.gate
        first, second = await one_under_way_and_one_in_line(made)
        async with made.post({"prompt": "c"}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        _, metrics = await made.get("/metrics")
        assert "baton_active_requests 1.0" in metrics and "baton_queued_requests 1.0" in metrics
        made.prefill[0].answer = None
        first.cancel()
        assert (await second).status == 200
        assert len(made.prefill[0].bodies) == 2  # what waits waits before prefill
        await until(lambda: (gate.active, gate.waiting) == (0, 0))

    with_house(test, max_requests=1, queue_size=1)


def test_who_leaves_the_line_is_not_served() -> None:
    async def test(made: House) -> None:
        gate = made.proxy.way.gate
        first, second = await one_under_way_and_one_in_line(made)
        second.cancel()
        await until(lambda: gate.waiting == 0)
        first.cancel()
        await until(lambda: gate.active == 0)
        assert len(made.prefill[0].bodies) == 1

    with_house(test, max_requests=1)


def test_the_time_in_line_is_part_of_the_time_to_the_first_token() -> None:
    async def test(made: House) -> None:
        first, second = await one_under_way_and_one_in_line(made, stream=True)
        await asyncio.sleep(0.2)
        made.prefill[0].answer = None
        first.cancel()
        await (await second).read()
        await until(lambda: made.proxy.way.gate.active == 0)
        _, metrics = await made.get("/metrics")
        values = {line.split(" ")[0]: float(line.split(" ")[1]) for line in metrics.splitlines() if line[0] != "#"}
        parts = {name: value for name, value in values.items() if name.startswith("baton_ttft_part_seconds_sum")}
        assert parts['baton_ttft_part_seconds_sum{part="queue"}'] >= 0.2
        assert sum(parts.values()) == pytest.approx(values["baton_ttft_seconds_sum"])
        assert values["baton_ttft_seconds_count"] == 1

    with_house(test, max_requests=1)


def test_hundreds_at_once_are_not_held_back_by_a_pool() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def together(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await free.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = together
        made.client.connector._limit = 0  # type: ignore[union-attr]
        asking = [asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__()) for _ in range(300)]
        await until(lambda: len(made.prefill[0].bodies) == 300, seconds=60)  # all are there before any is answered
        free.set()
        assert {response.status for response in await asyncio.gather(*asking)} == {200}

    with_house(test)


# what passes


@pytest.mark.parametrize("path", PASSED)
def test_what_is_no_generation_passes_to_one_engine_without_what_only_the_proxy_may_say(path: str) -> None:
    async def test(made: House) -> None:
        body = {"input": "a", "kv_transfer_params": {"remote_host": "evil"}}
        async with made.post(body, path=path, headers={"Authorization": "Bearer k"}) as response:
            assert response.status == 200
            assert await response.json() == {"path": path, "body": {"input": "a"}}
        assert len(made.decode[0].paths) == 1 and made.prefill[0].paths == []
        assert made.decode[0].headers[0]["authorization"] == "Bearer k"
        async with made.client.get(f"{made.url}{path}") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
        async with made.client.post(f"{made.url}{path}", data=b"no JSON") as response:
            assert response.status == 400

    with_house(test)


def test_headers_of_an_engine_that_concern_the_client_arrive_and_framing_does_not() -> None:
    async def test(made: House) -> None:
        async def limited(*_: Any) -> web.StreamResponse:
            headers = {"Retry-After": "7", "X-RateLimit-Remaining": "0", "X-Internal": "secret", "Server": "s"}
            return web.json_response({"error": {"message": "slow down"}}, status=429, headers=headers)

        for pool in (made.prefill, made.decode):
            pool[0].answer = limited
            async with made.post({"prompt": "a"}) as response:
                assert response.status == 429
                assert response.headers["Retry-After"] == "7"
                assert response.headers["X-RateLimit-Remaining"] == "0"
                assert "X-Internal" not in response.headers
            pool[0].answer = None

    with_house(test)


@pytest.mark.parametrize("named", [True, False])
def test_answers_name_the_instances_unless_told_not_to(named: bool) -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}) as response:
            assert ("x-baton-prefill" in response.headers) is named
            assert ("x-baton-decode" in response.headers) is named

    with_house(test, name_instances=named)


def test_a_clients_id_is_found_where_it_was_said_to_be() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, headers={"X-Correlation-Id": "mine"}) as response:
            assert response.headers["X-Request-Id"] == "mine"

    with_house(test, request_id_headers=("X-Request-Id", "X-Correlation-Id"))


# errors in the words of the API


def test_errors_speak_as_the_api_that_was_called() -> None:
    async def test(made: House) -> None:
        async with made.client.post(f"{made.url}/v1/messages", data=b"{") as response:
            assert response.status == 400
            answer = await response.json()
        assert answer["type"] == "error" and answer["error"]["type"] == "invalid_request_error"
        async with made.client.post(f"{made.url}/v1/responses", data=b"{") as response:
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}

    with_house(test)


# logs


def test_the_access_log_has_a_line_a_request_and_nothing_that_is_nobodys_business(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = tmp_path / "access.log"
    caplog.set_level(logging.DEBUG)
    secret = "s3cr3t"

    async def test(made: House) -> None:
        headers = {"Authorization": f"Bearer {secret}", "X-Request-Id": "x\ty", "Cookie": secret}
        body = {"prompt": secret * 100_000, "stream": True}
        async with made.post(body, headers=headers) as response:
            await response.read()
        async with made.client.get(f"{made.url}/v1/models?key={secret}", headers=headers) as response:
            assert response.status == 200
        async with made.client.get(f"{made.url}/no\u00e9%0athing?{secret}", headers=headers) as response:
            assert response.status == 404
        made.prefill[0].answer = hang
        asking = asyncio.ensure_future(made.post({"prompt": secret}, headers=headers).__aenter__())
        await until(lambda: len(made.prefill[0].bodies) == 2)
        asking.cancel()
        await until(lambda: made.proxy.way.gate.active == 0)
        async with made.client.post(f"{made.url}/v1/completions", data=secret.encode()) as response:
            assert response.status == 400

    with_house(test, access_log=str(log))
    lines = log.read_text().splitlines()
    assert [line.split()[1:4] for line in lines] == [
        ["POST", "/v1/completions", "200"],
        ["GET", "/v1/models", "200"],
        ["GET", "/no%C3%A9%0Athing", "404"],
        ["POST", "/v1/completions", "499"],
        ["POST", "/v1/completions", "400"],
    ]
    assert " prefill=P0 decode=D0 ttft=0." in lines[0]
    assert len(log.read_text()) < 1000
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("baton")]
    assert ours  # the engines were found usable
    assert secret not in log.read_text() + "\n".join(ours)


def test_a_path_cannot_break_the_access_log(tmp_path: Path) -> None:
    log = AccessLog(str(tmp_path / "log"))
    log.line("GET", "/a\nGET /b 200\x1b[31m", 404, 0.1)
    log.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "/a\\nGET" in line and "\x1b" not in line


def test_a_full_disk_costs_lines_and_no_requests(caplog: pytest.LogCaptureFixture) -> None:
    async def test(made: House) -> None:
        for _ in range(200):
            async with made.post({"prompt": "a"}) as response:
                assert response.status == 200
            made.proxy._access_log.flush()  # type: ignore[union-attr]

    with_house(test, access_log="/dev/full")
    assert caplog.text.count("the access log cannot be written: No space left on device") == 1


# stopping


def test_a_stop_finishes_open_streams_and_takes_no_new_requests() -> None:
    async def test(made: House) -> None:
        free = asyncio.Event()

        async def halting(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            response = await stream(request, [b"data: 1\n\n"])
            await free.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        made.decode[0].answer = halting
        async with made.post({"prompt": "a", "stream": True}) as response:
            assert await response.content.readuntil(b"\n\n") == b"data: 1\n\n"
            stopping = asyncio.create_task(made.proxy.stop(30.0))
            await asyncio.sleep(0)
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", int(made.url.rpartition(":")[2]))
            free.set()
            assert await response.read() == b"data: [DONE]\n\n"
        await stopping

    with_house(test)


def test_traces_cover_the_request_and_both_legs_and_are_told_to_engines() -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from baton.proxy.tracing import Tracer

    exporter = InMemorySpanExporter()

    async def test(made: House) -> None:
        object.__setattr__(made.proxy.way, "tracer", Tracer(None, exporter))
        trace = "0af7651916cd43dd8448eb211c80319c"
        headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01", "tracestate": "v=1"}
        async with made.post({"prompt": "a"}, headers=headers) as response:
            assert response.status == 200
        made.decode[0].answer = hang
        asking = asyncio.ensure_future(made.post({"prompt": "a"}).__aenter__())
        await until(lambda: len(made.decode[0].bodies) == 2)
        asking.cancel()
        await until(lambda: made.proxy.way.gate.active == 0)
        assert made.proxy.way.tracer is not None
        made.proxy.way.tracer.close()
        spans = exporter.get_finished_spans()
        assert [span.name for span in spans] == ["prefill", "decode", "POST /v1/completions"] * 2
        prefill, decode, whole = spans[:3]
        assert whole.parent is not None and f"{whole.parent.span_id:x}" == "b7ad6b7169203331"
        assert whole.attributes is not None and whole.attributes["http.response.status_code"] == 200
        for span, engine in ((prefill, made.prefill[0]), (decode, made.decode[0])):
            assert span.parent is not None and span.parent.span_id == whole.context.span_id
            assert engine.headers[0]["traceparent"] == f"00-{trace}-{span.context.span_id:016x}-01"
            assert engine.headers[0]["tracestate"] == "v=1"
        assert not spans[4].status.is_ok

    with_house(test)


def test_without_tracing_the_clients_trace_context_passes() -> None:
    async def test(made: House) -> None:
        async with made.post({"prompt": "a"}, headers={"traceparent": "00-a-b-01"}):
            pass
        for engine in (*made.prefill, *made.decode):
            assert engine.headers[0]["traceparent"] == "00-a-b-01"

    with_house(test)


def test_a_body_is_json_to_the_client_as_it_was_to_the_engine() -> None:
    async def test(made: House) -> None:
        raw = b'{"choices": [ {"text": "\\u00e9", "finish_reason": "stop"} ],  "kv_transfer_params": null}'

        async def odd(*_: Any) -> web.StreamResponse:
            return web.Response(body=raw, content_type="application/json")

        made.decode[0].answer = odd
        async with made.post({"prompt": "a"}) as response:
            assert await response.read() == raw
        assert json.loads(raw)

    with_house(test)
