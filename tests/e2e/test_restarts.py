"""Engines that are killed and come back on the same port: nothing that the other remembers of them is used again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.launch.leftovers import session_alive
from tests.e2e import tiny
from tests.e2e.engines import START_SECONDS, Server, eventually, start
from tests.e2e.test_hostile_tickets import MODES, Victims, about, tokens
from tests.e2e.topology import Cluster, cluster, used_kv


@pytest.fixture(scope="module", params=["read", "write"])
def running(request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    mode = request.param
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster(f"restarts-{mode}", model, logs, prefill=(MODES[mode],), decode=(MODES[mode],)) as made:
        house = Victims(mode, replace(made, prefill=list(made.prefill), decode=list(made.decode)), {})
        started: list[Server] = []
        try:
            yield house, logs, started
        finally:
            for server in started:
                server.stop()


def kill(server: Server) -> None:
    """As the kernel does when memory runs out: no goodbye."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait(30)
    assert eventually(lambda: session_alive(server.process.pid), False, 30.0) is False
    for segment in server.segments:
        segment.unlink(missing_ok=True)


def again(server: Server, logs: Path, started: list[Server]) -> Server:
    """The same command on the same ports."""
    made = start(
        f"{server.name}-{time.monotonic_ns()}", tuple(server.process.args), server.port, logs, {"OMP_NUM_THREADS": "1"}
    )  # type: ignore[arg-type]
    started.append(made)
    made.wait_healthy()
    return made


def readiness(proxy: Server) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{proxy.url}/readiness", timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def proven(cluster: Cluster) -> bool:
    code, said = readiness(cluster.proxy)
    return code == 200 and said["warm_up"]["proven"] == 1 and not said["reasons"]


def test_all_is_well_at_first(running: Any) -> None:
    house, _, _ = running
    assert eventually(lambda: proven(house.cluster), True) is True
    house.well()


def test_a_prefill_server_that_is_killed_fails_its_own_requests_and_comes_back(running: Any) -> None:
    house, logs, started = running
    prompt = tokens(70)
    house.right(prompt)
    old, ticket = about(house.prefill)["engine_id"], house.ticket(prompt)
    kill(house.prefill)
    assert house.endures(house.decode, prompt, ticket) >= 400
    assert eventually(lambda: readiness(house.cluster.proxy)[0], 503) == 503
    house.cluster.prefill[0] = again(house.prefill, logs, started)
    assert about(house.prefill)["engine_id"] != old
    assert eventually(lambda: proven(house.cluster), True, START_SECONDS) is True
    assert house.endures(house.decode, prompt, ticket) >= 400
    house.well()


def test_a_decode_server_that_is_killed_leaves_nothing_at_its_prefill_server(running: Any) -> None:
    house, logs, started = running
    prompt = tokens(90, 3)
    house.right(prompt)
    house.ticket(prompt)
    kill(house.decode)
    house.cluster.decode[0] = again(house.decode, logs, started)
    assert eventually(lambda: proven(house.cluster), True, START_SECONDS) is True
    assert eventually(lambda: used_kv([house.prefill]), 0.0) == 0.0
    house.well()
