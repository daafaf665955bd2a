"""Engines that the end-to-end tests share: a reference server first, then one prefill, one decode and a proxy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.models import EMBEDDED, ensure
from tests.e2e import prompts
from tests.e2e.engines import BATON, BLOCK, Server, generate_all, start
from tests.ports import free_ports

MODEL = "smollm2-135m-instruct"
FLAGS = (
    *("--host", "127.0.0.1", "--block-size", str(BLOCK), "--max-model-len", "1024", "--max-num-seqs", "8"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "e2e" in Path(item.fspath).parts:
            item.add_marker("e2e")


@dataclass(frozen=True)
class Pair:
    """1P1D with a proxy, each started by Baton's own command."""

    prefill: Server
    decode: Server
    proxy: Server


def _cores() -> tuple[tuple[str, ...], tuple[str, ...]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return (), ()
    half = len(cores) // 2
    return tuple(("--cpus", ",".join(map(str, part))) for part in (cores[:half], cores[half:]))  # type: ignore[return-value]


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def model_path() -> Path:
    return ensure(EMBEDDED[MODEL])


@pytest.fixture(scope="session")
def left_behind() -> list[Path]:
    """Shared memory that engines left when they were stopped."""
    return []


@pytest.fixture(scope="session")
def reference(logs: Path, model_path: Path, left_behind: list[Path]) -> dict[str, str]:
    """What one plain server, without any connector, answers to every case; by the case's name."""
    (port,) = free_ports(1)
    argv = (
        BATON[0],
        "-m",
        "baton.engine.serve",
        str(model_path),
        "--served-model-name",
        MODEL,
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        str(1 << 29),
        *FLAGS,
    )
    environ = {
        "BATON_ENGINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    server = start("reference", argv, port, logs, environ)
    try:
        server.wait_healthy()
        return generate_all(server.url, {case.name: case.body for case in prompts.cases(server.url, MODEL)})
    finally:
        left_behind += server.stop()


@pytest.fixture(scope="session")
def pair(logs: Path, reference: dict[str, str]) -> Iterator[Pair]:
    """Started after the reference has stopped: there are two cores."""
    p_port, d_port, proxy_port, p_side, d_side = free_ports(5)
    # Imports are written to the logs, for the test that compares them with the lock.
    environ: dict[str, Any] = {"PYTHONPROFILEIMPORTTIME": "1"}
    servers: list[Server] = []
    try:
        for role, port, side, cores in zip(
            ("prefill", "decode"), (p_port, d_port), (p_side, d_side), _cores(), strict=True
        ):
            argv = (
                *BATON,
                "engine",
                MODEL,
                "--role",
                role,
                "--port",
                str(port),
                "--side-channel-port",
                str(side),
                *cores,
                *FLAGS,
                "--enable-prompt-tokens-details",
                "--enable-scale-out",
            )
            servers.append(start(role, argv, port, logs, environ))
        proxy = (
            *BATON,
            "proxy",
            "--port",
            str(proxy_port),
            "--prefiller-ports",
            str(p_port),
            "--decoder-ports",
            str(d_port),
        )
        servers.append(start("proxy", proxy, proxy_port, logs))
        for server in servers:
            server.wait_healthy()
        yield Pair(*servers)
    finally:
        for server in servers:
            server.stop()
