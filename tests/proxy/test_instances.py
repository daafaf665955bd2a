"""Instances that come, go and drain while requests are under way, and the file that names them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.cluster import Endpoint, Role
from baton.proxy.fleet import InstanceState
from baton.proxy.forever import forever
from baton.proxy.instances_file import BadInstancesFile, Change, change, parse
from tests.proxy.fakes import FakeEngine, House, hang, prefill_answer, stream, until, with_house

P, D = Role.PREFILL, Role.DECODE


async def ask(made: House, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, dict[str, Any]]:
    async with made.client.request(method, f"{made.url}{path}", json=body, **options) as response:
        return response.status, await response.json()


async def status(made: House, **body: Any) -> int:
    async with made.post({"prompt": "a", **body}) as response:
        await response.read()
        return int(response.status)


async def another(made: House, role: Role) -> FakeEngine:
    """One more engine, which the proxy doesn't know."""
    engine = FakeEngine(role, made.ledger)
    await engine.start()
    (made.prefill if role is P else made.decode).append(engine)
    return engine


def ids(made: House) -> list[str]:
    return [each.id for each in made.proxy.fleet]


@pytest.mark.parametrize("role", [P, D])
def test_an_instance_is_added_while_the_proxy_runs_and_used_at_once(role: Role) -> None:
    async def test(made: House) -> None:
        engine = await another(made, role)
        code, row = await ask(made, "POST", "/instances", {"role": role, "url": engine.endpoint.url})
        assert code == 201
        assert (row["id"], row["role"], row["usable"]) == (f"{role.letter}1", role, True)
        assert {await status(made) for _ in range(10)} == {200}
        assert len(engine.bodies) == 5
        assert engine.server is not None
        await engine.server.close()

    with_house(test)


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ({"role": "prefill", "url": "<P0>"}, 409, "is P0, a prefill server, already"),
        ({"role": "decode", "url": "<P0>"}, 409, "is P0, a prefill server, already"),
        ({"role": "decode", "url": "https:<D0>"}, 409, "is D0, a decode server, already"),
        ({"role": "both", "url": "http://h:1"}, 400, "role is 'both', neither 'prefill' nor 'decode'"),
        ({"url": "http://h:1"}, 400, "role is None"),
        ({"role": "prefill"}, 400, "None is not a URL"),
        ({"role": "prefill", "url": "h:8100"}, 400, "'h:8100' is not a URL such as http://host:8100"),
        ({"role": "prefill", "url": "ftp://h:8100"}, 400, "is not a URL"),
        ({"role": "prefill", "url": "http://h:99999"}, 400, "is not a URL"),
        ({"role": "prefill", "url": "http://h:1/v1"}, 400, "is not a URL"),
        ({"role": "prefill", "url": "http://me@h:1"}, 400, "is not a URL"),
        (["a list"], 400, "JSON object"),
    ],
)
def test_what_cannot_be_added_is_refused_and_changes_nothing(body: Any, code: int, said: str) -> None:
    async def test(made: House) -> None:
        named = json.dumps(body)
        for name, engine in (("P0", made.prefill[0]), ("D0", made.decode[0])):
            named = named.replace(f"https:<{name}>", f"https://{engine.endpoint.authority}")
            named = named.replace(f"<{name}>", engine.endpoint.url)
        found, answer = await ask(made, "POST", "/instances", json.loads(named))
        assert found == code
        assert said in answer["error"]["message"]
        assert ids(made) == ["P0", "D0"]

    with_house(test)


def test_an_instance_that_is_unknown_is_a_404_that_says_who_is_known() -> None:
    async def test(made: House) -> None:
        for method, path in (("DELETE", "/instances/P7"), ("GET", "/instances/P7"), ("POST", "/instances/P7/drain")):
            code, answer = await ask(made, method, path)
            assert code == 404
            assert answer["error"]["message"] == "there is no instance 'P7': P0, D0 are known"
        assert (await ask(made, "GET", "/instances/P0/drain"))[0] == 405
        assert (await ask(made, "GET", "/instances/P0/stop"))[0] == 404
        assert (await ask(made, "GET", "/instancesP0"))[0] == 404
        assert (await ask(made, "GET", "/instances/P0"))[1]["id"] == "P0"

    with_house(test)


@pytest.mark.parametrize(
    "asked",
    [("POST", "/instances"), ("DELETE", "/instances/P0"), ("POST", "/instances/P0/drain"), ("GET", "/instances")],
)
def test_changes_ask_for_the_admin_key(asked: tuple[str, str]) -> None:
    async def test(made: House) -> None:
        for key in (None, "client"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert (await ask(made, *asked, headers=headers))[0] == 401
        assert ids(made) == ["P0", "D0"]
        assert (await ask(made, "DELETE", "/instances/P0", headers={"Authorization": "Bearer admin"}))[0] == 200

    with_house(test, api_keys=("client",), admin_key="admin")


def test_one_is_removed_under_traffic_and_its_work_goes_to_its_own_role() -> None:
    async def test(made: House) -> None:
        seen: list[int] = []
        stop = False

        async def client() -> None:
            while not stop:
                seen.append(await status(made))

        async def more(answers: int) -> None:
            known = len(seen)
            await until(lambda: len(seen) > known + answers)

        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(client())
            for name, role in (("P0", P), ("D1", D)):
                await more(20)
                code, row = await ask(made, "DELETE", f"/instances/{name}")
                assert (code, row["id"]) == (200, name)
                engine = (made.prefill if role is P else made.decode)[int(name[1])]
                await more(8)
                asked = len(engine.bodies)
                await more(20)
                assert len(engine.bodies) == asked
            stop = True
        assert set(seen) == {200}
        assert ids(made) == ["P1", "D0"]
        # no prefill leg ever went to a decode server, nor the other way
        assert all(body.get("max_tokens") == 1 for engine in made.prefill for body in engine.bodies)
        assert not any(
            body["kv_transfer_params"].get("do_remote_decode") for engine in made.decode for body in engine.bodies
        )

    with_house(test, prefill=2, decode=2)


@pytest.mark.parametrize(("name", "role"), [("P0", P), ("D0", D)])
def test_the_last_of_a_role_may_go_which_is_a_503_and_its_number_is_never_used_again(name: str, role: Role) -> None:
    async def test(made: House) -> None:
        assert (await ask(made, "DELETE", f"/instances/{name}"))[0] == 200
        async with made.post({"prompt": "a"}) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert f"no {role} server is usable (0 known)" in (await response.json())["error"]["message"]
        assert (await made.get("/health"))[0] == 503
        engine = (made.prefill if role is P else made.decode)[0]
        code, row = await ask(made, "POST", "/instances", {"role": role, "url": engine.endpoint.url})
        assert (code, row["id"]) == (201, f"{role.letter}1")
        assert await status(made) == 200

    with_house(test)


def test_what_is_in_flight_on_one_that_is_removed_comes_whole() -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()
        made.decode[0].answer = until_released(release)
        whole = asyncio.create_task(text_of(made))
        await until(lambda: made.proxy.fleet.pools[D][0].in_flight == 1)
        assert (await ask(made, "DELETE", "/instances/D0"))[0] == 200
        release.set()
        assert (await whole).endswith("data: [DONE]\n\n")

    with_house(test)


def test_one_that_is_removed_before_its_leg_is_still_used_by_the_request_that_chose_it() -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = slow
        waiting = asyncio.create_task(status(made))
        await until(lambda: len(made.prefill[0].bodies) == 1)
        assert (await ask(made, "DELETE", "/instances/D0"))[0] == 200
        # long enough for what is unused to be thrown away
        await asyncio.sleep(1.2)
        release.set()
        assert await waiting == 200

    with_house(test)


def until_released(release: asyncio.Event) -> Callable[..., Any]:
    """A stream whose end waits."""

    async def answer(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = await stream(request, [b'data: {"choices": [{"text": "a"}]}\n\n'])
        await release.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    return answer


async def text_of(made: House) -> str:
    async with made.post({"prompt": "a", "stream": True}) as response:
        return str(await response.text())


def test_a_decode_server_with_a_stream_drains_when_the_stream_ends_and_gets_no_new_work() -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()
        made.decode[0].answer = until_released(release)
        whole = asyncio.create_task(text_of(made))
        instance = made.proxy.fleet.pools[D][0]
        await until(lambda: instance.in_flight == 1)
        code, row = await ask(made, "POST", "/instances/D0/drain")
        assert (code, row["state"], row["in_flight"]) == (202, "draining", 1)
        assert {await status(made) for _ in range(10)} == {200}
        assert len(made.decode[0].bodies) == 1
        assert (await ask(made, "GET", "/instances/D0"))[1]["state"] == "draining"
        release.set()
        assert (await whole).endswith("data: [DONE]\n\n")
        await until(lambda: instance.state() is InstanceState.DRAINED)
        _, row = await ask(made, "GET", "/instances/D0")
        assert (row["state"], row["draining"], row["usable"], row["last_error"]) == ("drained", True, False, None)
        _, text = await made.get("/metrics")
        assert f'baton_instance_state{{instance="{instance.endpoint.authority}",role="decode"}} 4.0' in text

    with_house(test, decode=2)


def test_a_prefill_server_with_a_ticket_out_drains_when_it_is_pulled() -> None:
    async def test(made: House) -> None:
        out = {"P0": 2}
        made.proxy.fleet.held = lambda instance: out.get(instance.id, 0)
        _, row = await ask(made, "POST", "/instances/P0/drain?remove=true")
        assert (row["state"], row["held"], row["in_flight"]) == ("draining", 2, 0)
        await asyncio.sleep(0.4)
        assert ids(made) == ["P0", "P1", "D0"]
        out["P0"] = 0
        await until(lambda: ids(made) == ["P1", "D0"])

    with_house(test, prefill=2)


def test_a_request_that_is_still_prefilled_is_waited_for_by_the_decode_server_it_goes_to() -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()

        async def slow(engine: FakeEngine, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            await release.wait()
            return await prefill_answer(engine, request, body)

        made.prefill[0].answer = slow
        waiting = asyncio.create_task(status(made))
        await until(lambda: len(made.prefill[0].bodies) == 1)
        _, row = await ask(made, "POST", "/instances/D0/drain")
        assert (row["state"], row["in_flight"], row["waiting"]) == ("draining", 0, 1)
        assert (await ask(made, "GET", "/instances/D1"))[1]["waiting"] == 0
        instance = made.proxy.fleet.pools[D][0]
        await asyncio.sleep(0.4)
        assert instance.state() is InstanceState.DRAINING
        release.set()
        assert await waiting == 200
        assert len(made.decode[0].bodies) == 1
        await until(lambda: instance.state() is InstanceState.DRAINED)

    with_house(test, decode=2)


def test_what_another_worker_has_on_an_instance_is_waited_for_too() -> None:
    class Others:
        """Stands for the other workers."""

        def __init__(self) -> None:
            self.row = {"id": "D0", "in_flight": 0, "held": 0, "waiting": 0}

        async def ask(self, path: str) -> list[bytes]:
            assert path == "/instances"
            return [json.dumps({"instances": [{**self.row, "id": "P0", "in_flight": 9}, self.row]}).encode()]

        async def tell(self, path: str, body: bytes) -> None: ...

    async def test(made: House) -> None:
        others = Others()
        made.proxy.members._peers = others  # type: ignore[assignment]
        instance = made.proxy.fleet.pools[D][0]
        others.row["in_flight"] = 1
        await made.proxy.members.drain("D0")
        for count, after in (("in_flight", "held"), ("held", "waiting"), ("waiting", None)):
            await asyncio.sleep(0.3)
            assert instance.state() is InstanceState.DRAINING
            if after is not None:
                others.row[after] = 1
            others.row[count] = 0
        await until(lambda: instance.state() is InstanceState.DRAINED)

    with_house(test, decode=2)


@pytest.mark.parametrize("remove", ["true", "false"])
def test_a_drain_that_takes_too_long_is_said_and_cuts_nothing(remove: str) -> None:
    async def test(made: House) -> None:
        release = asyncio.Event()
        made.decode[0].answer = until_released(release)
        whole = asyncio.create_task(text_of(made))
        instance = made.proxy.fleet.pools[D][0]
        await until(lambda: instance.in_flight == 1)
        await ask(made, "POST", f"/instances/D0/drain?timeout_secs=0.2&remove={remove}")
        await until(lambda: instance.last_error != "")
        assert instance.last_error == "not drained after 0.2 s: 1 requests or tickets are still out"
        await until(lambda: instance.removed is (remove == "true"))
        assert instance.state() is InstanceState.DRAINING
        release.set()
        assert (await whole).endswith("data: [DONE]\n\n")

    with_house(test, decode=2)


@pytest.mark.parametrize("query", ["remove=yes", "timeout_secs=soon", "timeout_secs=-1", "timeout_secs=nan", "force=1"])
def test_a_drain_that_is_asked_for_wrongly_is_a_400(query: str) -> None:
    async def test(made: House) -> None:
        assert (await ask(made, "POST", f"/instances/D0/drain?{query}"))[0] == 400
        assert made.proxy.fleet.pools[D][0].usable

    with_house(test)


def test_one_that_is_draining_is_taken_back_by_adding_it_again() -> None:
    async def test(made: House) -> None:
        made.decode[0].answer = hang
        url = made.decode[0].endpoint.url
        left = asyncio.create_task(status(made))
        instance = made.proxy.fleet.pools[D][0]
        await until(lambda: instance.in_flight == 1)
        await ask(made, "POST", "/instances/D0/drain?remove=true")
        assert await status(made) == 503
        code, row = await ask(made, "POST", "/instances", {"role": "decode", "url": url})
        assert (code, row["id"], row["state"], row["in_flight"]) == (200, "D0", "usable", 1)
        left.cancel()
        await until(lambda: instance.in_flight == 0)
        await asyncio.sleep(0.3)
        made.decode[0].answer = None
        assert await status(made) == 200

    with_house(test)


ROWS = [{"role": "prefill", "url": "http://h:1"}, {"role": "decode", "url": "https://h:2"}]
FILED = (Endpoint(role=P, host="h", port=1), Endpoint(role=D, host="h", port=2, tls=True))


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(ROWS),
        "- {role: prefill, url: 'http://h:1'}\n- role: decode\n  url: https://h:2\n",
    ],
)
def test_a_file_of_instances_is_json_or_yaml(raw: str) -> None:
    assert parse(raw.encode()) == FILED


def test_an_empty_list_is_a_list() -> None:
    assert parse(b"[]") == ()


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("", "it holds no list"),
        ("prefill: [http://h:1]", "it holds no list"),
        ("[{", "it is neither JSON nor YAML"),
        ("- {role: prefill, url: 2024-99-99}", "it is neither JSON nor YAML: month must be in 1..12"),
        ("- {role: prefill, url: 0b_}", "it is neither JSON nor YAML: "),
        ("- {role: prefill, url: !!timestamp abc}", "it is neither JSON nor YAML: "),
        ("- {role: prefill, url: " + "[" * 3000 + "]" * 3000 + "}", "it is neither JSON nor YAML: "),
        ('[{"role": "prefill"}]', "entry 1 is {'role': 'prefill'}, not an object with role and url"),
        ('["http://h:1"]', "entry 1 is 'http://h:1', not an object with role and url"),
        (json.dumps([*ROWS, {**ROWS[0], "weight": 2}]), "entry 3 is"),
        (json.dumps([*ROWS, {"role": "x", "url": "http://h:3"}]), "entry 3: role is 'x'"),
        (json.dumps([*ROWS, {"role": "decode", "url": "h"}]), "entry 3: 'h' is not a URL"),
        (
            json.dumps([*ROWS, {"role": "decode", "url": "http://h:1"}]),
            "entry 3: h:1 is named twice, as a prefill and a decode server",
        ),
    ],
)
def test_a_bad_file_is_refused_whole_and_says_where(raw: str, said: str) -> None:
    with pytest.raises(BadInstancesFile) as caught:
        parse(raw.encode())
    assert str(caught.value).startswith(said)


def test_one_that_changes_its_role_goes_and_comes() -> None:
    moved = Endpoint(role=D, host="h", port=1)
    assert change(FILED, (moved, FILED[1])) == Change((moved,), (FILED[1],), (FILED[0],))


def written(path: Path, engines: list[FakeEngine]) -> None:
    path.write_text(json.dumps([{"role": each.role, "url": each.endpoint.url} for each in engines]))


def test_a_file_that_changes_is_taken_over_under_traffic_and_those_that_stay_keep_what_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.proxy.members.FILE_SECONDS", 0.05)
    path = tmp_path / "instances.json"

    def prepare(engines: list[FakeEngine]) -> None:
        written(path, engines)

    async def test(made: House) -> None:
        release = asyncio.Event()
        made.decode[0].answer = until_released(release)
        whole = asyncio.create_task(text_of(made))
        kept = made.proxy.fleet.pools[D][0]
        await until(lambda: kept.in_flight == 1)
        kept.leg_bad("500")
        engine = await another(made, P)
        other = await another(made, D)
        written(path, [engine, made.decode[0], other])
        await until(lambda: ids(made) == ["P1", "D0", "D1"])
        assert made.proxy.fleet.pools[D][0] is kept
        assert (kept.in_flight, kept.breaker.failures) == (1, 1)
        await until(lambda: all(each.usable for each in made.proxy.fleet))
        made.decode[0].answer = None
        assert {await status(made) for _ in range(6)} == {200}
        assert len(other.bodies) == 3
        release.set()
        assert (await whole).endswith("data: [DONE]\n\n")
        _, text = await made.get("/metrics")
        assert 'baton_instances_file_reloads_total{result="ok"} 1.0' in text
        for each in (engine, other):
            assert each.server is not None
            await each.server.close()

    with_house(test, prepare=prepare, instances_file=str(path))


def test_a_file_that_is_bad_changes_nothing_and_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "instances.json"

    def prepare(engines: list[FakeEngine]) -> None:
        written(path, engines)

    async def test(made: House) -> None:
        good = path.read_text()
        api = made.prefill[0].endpoint
        added = Endpoint(role=P, host="127.0.0.1", port=1)
        await made.proxy.members.add(added)
        for bad in (
            good[: len(good) // 2],
            json.dumps([{"role": "decode", "url": added.url}]),
            good.replace(api.url, "nonsense"),
        ):
            path.write_text(bad)
            await made.proxy.reload()
            assert ids(made) == ["P0", "P1", "D0"]
            assert not any(each.draining for each in made.proxy.fleet)
        path.unlink()
        await made.proxy.reload()
        assert ids(made) == ["P0", "P1", "D0"]
        _, text = await made.get("/metrics")
        assert 'baton_instances_file_reloads_total{result="refused"} 4.0' in text
        # what came by the API is not the file's to take away
        path.write_text(json.dumps([{"role": "decode", "url": made.decode[0].endpoint.url}]))
        await made.proxy.reload()
        await until(lambda: ids(made) == ["P1", "D0"])

    with caplog.at_level(logging.ERROR, "baton.proxy"):
        with_house(test, prepare=prepare, instances_file=str(path))
    assert "the instances stay as they are" in caplog.text


def test_what_a_worker_is_told_is_what_it_has_and_old_news_change_nothing() -> None:
    async def test(made: House) -> None:
        members, fleet = made.proxy.members, made.proxy.fleet
        told = {**members.snapshot(), "version": 7}
        rows = told["instances"]
        told["instances"] = [rows[0], {**rows[1], "number": 4, "url": "http://127.0.0.1:1", "draining": True}]
        told["numbers"] = {"prefill": 3, "decode": 5}
        members.adopt(told)
        assert ids(made) == ["P0", "D4"]
        assert fleet.pools[D][0].draining
        assert fleet.add(Endpoint(role=P, host="h", port=1)).id == "P3"
        for version in (6, 7):
            members.adopt({**told, "version": version, "instances": []})
        assert ids(made) == ["P0", "P3", "D4"]
        # it has nothing to do, and nobody else waits for it
        await until(lambda: fleet.pools[D][0].drained)

    with_house(test)


@pytest.mark.parametrize("bad", ["- {role: prefill, url: 2024-99-99}", "", "[{"])
def test_a_good_file_after_a_bad_one_is_taken(bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.proxy.members.FILE_SECONDS", 0.02)
    path = tmp_path / "instances.yaml"

    async def test(made: House) -> None:
        path.write_text(bad)
        reloads = made.proxy.way.metrics.reloads
        await until(lambda: reloads._values.get(("refused",)) == 1)
        written(path, made.prefill)
        await until(lambda: ids(made) == ["P0"])

    with_house(test, prepare=lambda engines: written(path, engines), instances_file=str(path))


def test_a_step_that_breaks_is_not_the_last_of_what_is_done_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    async def step() -> None:
        done.append(1)
        if len(done) < 3:
            raise ValueError("odd")

    async def go() -> None:
        task = asyncio.create_task(forever(0.001, step))
        await until(lambda: len(done) >= 5)
        task.cancel()

    asyncio.run(go())
    assert [each.levelname for each in caplog.records if each.name == "baton.proxy"] == ["ERROR"] * 2


def test_a_file_that_changes_while_the_proxy_starts_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.proxy.members.FILE_SECONDS", 0.02)
    path = tmp_path / "instances.json"
    writing: list[asyncio.Task[None]] = []

    def prepare(engines: list[FakeEngine]) -> None:
        written(path, engines)
        # The start waits for it.
        engines[1].health = None

        async def write() -> None:
            await until(lambda: engines[1].probed > 0)
            written(path, [engines[0], engines[2]])

        writing.append(asyncio.create_task(write()))

    async def test(made: House) -> None:
        assert writing[0].done()
        await until(lambda: ids(made) == ["P0", "D0"])

    with_house(test, prefill=2, prepare=prepare, instances_file=str(path), probe_timeout_seconds=0.3)


@pytest.mark.parametrize("goes", ["drained", "removed"])
def test_an_address_that_is_still_in_the_way_is_taken_once_it_is_free(
    goes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.proxy.members.FILE_SECONDS", 0.02)
    path = tmp_path / "instances.json"

    async def test(made: House) -> None:
        held = 1
        made.proxy.fleet.held = lambda instance: held if instance.id == "P1" else 0
        written(path, [made.prefill[0], *made.decode])
        await until(lambda: made.proxy.fleet.pools[P][1].draining)
        changed = [
            {"role": role, "url": each.endpoint.url}
            for role, each in zip((P, D, D), (*made.prefill, *made.decode), strict=True)
        ]
        path.write_text(json.dumps(changed))
        await until(lambda: made.proxy.way.metrics.reloads._values.get(("refused",)) == 1)
        assert ids(made) == ["P0", "P1", "D0"]
        if goes == "drained":
            held = 0
        else:
            assert (await ask(made, "DELETE", "/instances/P1"))[0] == 200
        await until(lambda: ids(made) == ["P0", "D0", "D1"])
        assert made.proxy.fleet.pools[D][1].endpoint.authority == made.prefill[1].endpoint.authority

    with_house(test, prefill=2, prepare=lambda engines: written(path, engines), instances_file=str(path))


def test_one_whose_adding_was_given_up_is_probed_all_the_same() -> None:
    async def test(made: House) -> None:
        engine = await another(made, D)
        engine.health = None
        adding = asyncio.create_task(ask(made, "POST", "/instances", {"role": D, "url": engine.endpoint.url}))
        await until(lambda: engine.probed > 0)
        adding.cancel()
        assert ids(made) == ["P0", "D0", "D1"]
        version = made.proxy.members.snapshot()["version"]
        assert version == 1
        engine.health = 200
        await until(lambda: made.proxy.fleet.pools[D][1].usable)
        assert engine.server is not None
        await engine.server.close()

    with_house(test, probe_timeout_seconds=0.2, probe_interval_seconds=0.05)


def test_half_a_file_is_not_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.proxy.members.FILE_SECONDS", 0.1)
    path = tmp_path / "instances.yaml"

    def prepare(engines: list[FakeEngine]) -> None:
        written(path, engines)

    async def test(made: House) -> None:
        good = path.read_text()
        # whoever writes it takes his time, and each beginning of it is a list
        for turn in range(12):
            path.write_text("[]" + " " * turn)
            await asyncio.sleep(0.03)
        path.write_text(good)
        await asyncio.sleep(0.5)
        assert ids(made) == ["P0", "D0"]
        assert not any(each.draining for each in made.proxy.fleet)

    with_house(test, prepare=prepare, instances_file=str(path))


def test_one_that_is_back_in_the_file_while_it_drains_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "instances.json"

    def prepare(engines: list[FakeEngine]) -> None:
        written(path, engines)

    async def test(made: House) -> None:
        made.proxy.fleet.held = lambda instance: int(instance.id == "P0")
        written(path, made.decode)
        await made.proxy.reload()
        assert made.proxy.fleet.pools[P][0].draining
        written(path, [*made.prefill, *made.decode])
        await made.proxy.reload()
        assert ids(made) == ["P0", "D0"]
        assert await status(made) == 200

    with_house(test, prepare=prepare, instances_file=str(path))
