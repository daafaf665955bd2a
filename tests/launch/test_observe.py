"""What `baton status` puts together: everybody is asked at once, and who hangs keeps nobody waiting."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from baton.cli.status import console, shown, well
from baton.cluster import Cluster, Instance, Role
from baton.launch import ClusterRecord, ProcessRecord, observe
from tests.launch.processes import METRICS
from tests.ports import free_ports

OBSERVE = importlib.import_module("baton.launch.observe")


class Fleet:
    """Engines and a proxy in this process.

    Attributes:
        asked: the ids of engines whose metrics were asked for, in order.
        hung: ids that never answer, ``proxy`` among them.
        together: how many engines must have been asked before any of them answers.
    """

    def __init__(self, engines: int, folder: Path) -> None:
        proxy, *ports = free_ports(1 + 2 * engines)
        self.asked: list[str] = []
        self.hung: set[str] = set()
        self.together = 0
        self._all = asyncio.Event()
        roles = [Role.PREFILL if index % 2 else Role.DECODE for index in range(engines)]
        instances = tuple(
            Instance(
                id=f"{role.letter}{index}",
                role=role,
                host="127.0.0.1",
                port=ports[2 * index],
                side_channel_port=ports[2 * index + 1],
            )
            for index, role in enumerate(roles)
        )
        cluster = Cluster(model="m", proxy_port=proxy, instances=instances)
        me = ProcessRecord(name="supervisor", pid=os.getpid(), created=0.0, log=folder)
        self.record = ClusterRecord(
            name="c",
            run="r",
            supervisor=me,
            control=folder / "control",
            scratch=folder,
            logs=folder,
            asked=cluster,
            cluster=cluster,
            model_folder="/m",
            served_model="m",
        )

    async def answer(self, name: str, path: str) -> Any:
        if name in self.hung:
            await asyncio.Event().wait()
        if name == "proxy":
            rows = [
                {"id": f"i{each.id}", "role": each.role, "url": each.url, "usable": True, "in_flight": 1, "held": 2}
                for each in self.record.cluster.instances
            ]
            return web.json_response({"instances": rows})
        if path == "/version":
            return web.json_response({"version": "0.32.0"})
        self.asked.append(name)
        if len(self.asked) >= self.together:
            self._all.set()
        await self._all.wait()
        return web.Response(text=METRICS)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Fleet]:
        async with AsyncExitStack() as stack:
            places = [(each.id, each.port) for each in self.record.cluster.instances]
            for name, port in [*places, ("proxy", self.record.cluster.proxy_port)]:
                runner = web.ServerRunner(web.Server(self._handler(name)), shutdown_timeout=0.1)
                await runner.setup()
                stack.push_async_callback(runner.cleanup)
                await web.TCPSite(runner, "127.0.0.1", port).start()
            yield self

    def _handler(self, name: str) -> Any:
        async def handle(request: web.BaseRequest) -> Any:
            return await self.answer(name, request.path)

        return handle


def seen(fleet: Fleet) -> dict[str, Any]:
    async def go() -> dict[str, Any]:
        async with asyncio.timeout(60), fleet.serving():
            return await observe(fleet.record, {})

    return asyncio.run(go())


ENGINE = {"running": 3.0, "kv_cache_usage": 0.5, "bytes_moved": 1.5e6, "version": "0.32.0"}


def test_all_engines_are_asked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers before all have been asked: one after the other would come to nothing."""
    monkeypatch.setattr(OBSERVE, "ENGINE_SECONDS", 30.0)
    fleet = Fleet(60, tmp_path)
    fleet.together = 60
    found = seen(fleet)
    assert [row["engine"] for row in found["processes"] if row["role"] != "proxy"] == [ENGINE] * 60


def test_one_that_hangs_costs_no_more_than_its_limit_and_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It never answers: that anything comes at all is the limit's doing.
    monkeypatch.setattr(OBSERVE, "ENGINE_SECONDS", 5.0)
    fleet = Fleet(8, tmp_path)
    fleet.hung = {"P3"}
    found = seen(fleet)
    engines = {row["id"]: row["engine"] for row in found["processes"]}
    assert engines.pop("P3") is None
    assert engines.pop("proxy") is None
    assert list(engines.values()) == [ENGINE] * 7


def test_a_proxy_that_hangs_is_said_and_engines_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.launch.proxy_client.ASK_SECONDS", 0.5)
    fleet = Fleet(2, tmp_path)
    fleet.hung = {"proxy"}
    found = seen(fleet)
    assert not found["proxy_answers"]
    assert [row["engine"] for row in found["processes"][:2]] == [ENGINE] * 2


def test_a_large_fleet_is_known_by_its_proxy_alone(tmp_path: Path) -> None:
    fleet = Fleet(65, tmp_path)
    found = seen(fleet)
    assert fleet.asked == []
    assert all(row["proxy"]["in_flight"] == 1 for row in found["processes"] if row["role"] != "proxy")


def test_what_is_shown_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are no markup of the table's."""
    row = {
        "id": "P0",
        "role": "prefill",
        "url": "http://[fd00::1]:8100",
        "state": "ready",
        "pid": 7,
        "seconds": 119.0,
        "boots": 2,
        "last_failure": "P0 died while ready (exit code 1): x [log: /a/P0.log]",
        "proxy": {"usable": True, "in_flight": 2, "held": 5},
        "engine": {"running": 1.0, "waiting": 0.0, "kv_cache_usage": 0.1, "bytes_moved": 2e6, "version": "0.32.0"},
    }
    value = {"name": "c", "model": "m", "proxy": "http://[fd00::1]:8000", "proxy_answers": True, "processes": [row]}
    console().print(shown(value))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "c: m at http://[fd00::1]:8000"
    heads, said = lines[1].split(), lines[2].split()
    assert heads[:5] == ["id", "state", "url", "pid", "up"]
    assert said == [
        *("P0", "ready", "http://[fd00::1]:8100", "7", "119", "s", "2"),
        *("2", "5", "1", "0", "10%", "2", "MB", "0.32.0"),
    ]
    assert lines[3].strip() == "P0 died while ready (exit code 1): x [log: /a/P0.log]"
    assert well(value)
