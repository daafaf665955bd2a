"""Running out of file descriptors: a server lives on and recovers, a client says that it is not the peer's fault."""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
STARVED_SECONDS = 1.5


@pytest.fixture(autouse=True, params=["asyncio", "uvloop"])
def loop_kind(request: pytest.FixtureRequest) -> str:
    """The loop of the other process."""
    kind: str = request.param
    return kind


def starved(kind: str, what: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.wire.starved", kind, what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


@contextlib.contextmanager
def serving(kind: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    child = starved(kind, "server")
    assert child.stdout is not None
    try:
        yield child, int(child.stdout.readline())
    finally:
        child.kill()
        child.communicate()


def cpu_seconds(connection: http.client.HTTPConnection) -> float:
    connection.request("GET", "/")
    return float(connection.getresponse().read())


def served(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        return cpu_seconds(connection) > 0
    except (ConnectionError, http.client.RemoteDisconnected):
        return False
    finally:
        connection.close()


def test_a_server_without_descriptors_neither_dies_nor_spins_and_recovers(loop_kind: str) -> None:
    with serving(loop_kind) as (child, port), contextlib.ExitStack() as stack:
        kept = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        cpu_seconds(kept)
        for _ in range(40):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
        before = cpu_seconds(kept)
        time.sleep(STARVED_SECONDS)
        # Who is connected is served all the while.
        assert cpu_seconds(kept) - before < STARVED_SECONDS / 3
        stack.close()
        # Once the server has seen that they left, whoever comes is served.
        give_up = time.monotonic() + 20
        while not served(port):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        kept.close()
        _, log = child.communicate("", timeout=20)
        assert child.returncode == 0, log
        assert log.count("out of system resource") < 10


@pytest.mark.parametrize("what", ["client", "unix-client"])
def test_a_client_without_descriptors_says_so_and_recovers(loop_kind: str, what: str) -> None:
    child = starved(loop_kind, what)
    said, log = child.communicate(timeout=30)
    assert said.splitlines() == [
        "hello",
        "OutOfDescriptors: no connection: this side has no file descriptors left; 0 open",
        "hello",
    ], log
