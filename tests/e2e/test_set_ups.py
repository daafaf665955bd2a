"""Set-ups that look disaggregated and aren't, with real engines: readiness tells them apart before anybody is served.

The engines are started once; each set-up is a proxy of its own over some of them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import BATON, Server, eventually, post, start
from tests.e2e.topology import FLAGS, MODEL, answer
from tests.ports import free_ports

STOCK = json.dumps(
    {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm.distributed.kv_transfer.kv_connector.v1.nixl"}
)
ROLES = {
    "prefill": ("prefill", ()),
    "decode": ("decode", ()),
    "bfloat16": ("prefill", ("--dtype", "bfloat16")),
    "stock": ("prefill", ("--kv-transfer-config", STOCK)),
}


@pytest.fixture(scope="module")
def engines(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One decode server, prefill servers that fit it or don't, and one engine without any connector."""
    model = str(tiny.llama(tmp_path_factory.mktemp("llama")))
    made: dict[str, Server] = {}
    environ = {"OMP_NUM_THREADS": "1"}
    try:
        for name, (role, more) in ROLES.items():
            port, side = free_ports(2)
            argv = (*BATON, "engine", model, "--role", role, "--port", str(port), "--side-channel-port", str(side))
            made[name] = start(f"set-up-{name}", (*argv, *FLAGS, *more), port, logs, environ)
        (port,) = free_ports(1)
        argv = (sys.executable, "-m", "baton.engine.serve", model, "--port", str(port), "--enforce-eager", *FLAGS)
        alone = {**environ, "BATON_ENGINE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        made["none"] = start("set-up-none", argv, port, logs, {**alone, "VLLM_HOST_IP": "127.0.0.1"})
        for server in made.values():
            server.wait_healthy()
        yield made
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Server.stop, made.values()))


@contextlib.contextmanager
def proxy(logs: Path, prefill: int, decode: int, *more: str) -> Iterator[Server]:
    (port,) = free_ports(1)
    ports = ("--prefiller-ports", str(prefill), "--decoder-ports", str(decode))
    made = start(f"set-up-proxy-{port}", (*BATON, "proxy", "--port", str(port), *ports, *more), port, logs)
    try:
        made.wait_healthy("/liveness")
        yield made
    finally:
        made.stop()


def readiness(made: Server) -> tuple[int, list[tuple[str, str]]]:
    """Status, and the reasons with their causes, once the pair was tried."""
    try:
        with urllib.request.urlopen(f"{made.url}/readiness", timeout=30) as response:
            code, said = response.status, json.load(response)
    except urllib.error.HTTPError as error:
        code, said = error.code, json.loads(error.read())
    return code, [(each["cause"], each["message"]) for each in said["reasons"]]


def first_reason(made: Server) -> tuple[str, str]:
    assert eventually(lambda: bool(readiness(made)[1]), True) is True
    code, reasons = readiness(made)
    assert code == 503
    return reasons[0]


@pytest.mark.parametrize("name", ["prefill", "stock"])
def test_a_pair_that_hands_over_is_ready(engines: dict[str, Server], logs: Path, name: str) -> None:
    """Also with a stock connector on the other side, which knows no question of ours."""
    with proxy(logs, engines[name].port, engines["decode"].port, "--on-no-transfer", "fail") as made:
        made.wait_healthy()
        prompt = list(range(20, 90))
        before = engines["decode"].metric("baton_kv_loads_total")
        assert answer(made.url, prompt) == answer(engines["decode"].url, prompt)
        assert eventually(lambda: engines["decode"].metric("baton_kv_loads_total") - before, 1.0) == 1.0


def test_two_dtypes_are_named_before_any_transfer(engines: dict[str, Server], logs: Path) -> None:
    with proxy(logs, engines["bfloat16"].port, engines["decode"].port) as made:
        cause, message = first_reason(made)
        assert cause == "incompatible"
        assert "dtype: P0 bfloat16, D0 float32" in message


def test_without_a_connector_on_either_side_it_is_said(engines: dict[str, Server], logs: Path) -> None:
    for prefill, decode, who in (("none", "decode", "P0"), ("prefill", "none", "D0")):
        with proxy(logs, engines[prefill].port, engines[decode].port) as made:
            cause, message = first_reason(made)
            assert cause == "no_connector"
            assert message.startswith(f"{who} has no KV connector")


def test_swapped_roles_are_said(engines: dict[str, Server], logs: Path) -> None:
    with proxy(logs, engines["decode"].port, engines["prefill"].port) as made:
        assert first_reason(made)[0] == "wrong_role"


def test_a_port_where_nobody_is_is_said(engines: dict[str, Server], logs: Path) -> None:
    (port,) = free_ports(1)
    with proxy(logs, port, engines["decode"].port) as made:
        cause, message = first_reason(made)
        assert cause == "wrong_endpoint"
        assert str(port) in message
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert post(f"{made.url}/v1/completions", body)[0] == 503
    with proxy(logs, port, engines["decode"].port, "--on-no-transfer", "fallback") as made:
        assert post(f"{made.url}/v1/completions", body)[0] == 200
        assert made.metric("baton_no_transfer_total", cause="no_prefill") == 1
