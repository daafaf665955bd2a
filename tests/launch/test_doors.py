"""A planned server listens where it is planned: flags that would move it are refused, with what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli import main
from baton.launch import LaunchError, PlanRequest, plan, read_cluster_file
from baton.launch.doors import check_doors
from tests.launch.test_cluster_file import file, planned

TLS = "`baton up` speaks http to what it starts"
MOVED = [
    ("--port 9000", "--port 9000: use the key port, or --prefill-port and --decode-port"),
    ("--port=9000", "--port 9000: use the key port"),
    ("--por 9000", "--port 9000: use the key port"),
    ("--host 1.2.3.4", "--host 1.2.3.4: use the key host, or --host of `baton up`"),
    ("--host", "--host: use the key host"),
    ("--uds /tmp/x", "--uds: it listens on a port; leave it out"),
    ("--headless", "--headless: it must answer at its API"),
    ("--api-server-count 0", "--api-server-count 0, which is headless: it must answer at its API"),
    ("-asc 0", "--api-server-count 0, which is headless"),
    ("--grpc", "--grpc: it must answer over HTTP"),
    ("--ssl-certfile x", f"--ssl-certfile: {TLS}"),
    ("--ssl_keyfile=x", f"--ssl-keyfile: {TLS}"),
    ("--ssl-cert-reqs 1", f"--ssl-cert-reqs: {TLS}"),
]
LISTED = "the engines of a plan are those under prefill and decode"
MOVED_PROXY = [
    ("--port 9000", "--port 9000: use the key proxy.port, or --port of `baton up`"),
    ("--host 1.2.3.4", "--host 1.2.3.4: use the key proxy.host, or --host of `baton up`"),
    ("--uds /tmp/x", "--uds: it listens on a port"),
    ("--ssl-certfile x", f"--ssl-certfile: {TLS}"),
    *(
        (f"{flag} 1", f"{flag}: {LISTED}")
        for flag in (
            *("--prefiller-ports", "--prefiller-port", "--prefiller-hosts", "--prefiller-host", "--prefill"),
            *("--decoder-ports", "--decoder-port", "--decoder-hosts", "--decoder-host", "--decode"),
            *("--instances-file", "--cluster", "-f"),
        )
    ),
]


@pytest.mark.parametrize(("flags", "said"), MOVED)
@pytest.mark.parametrize("key", ["defaults: {engine_args: %s}", "decode: [{port: 8300, engine_args: %s}]"])
def test_a_file_cannot_move_an_engine_by_a_flag(tmp_path: Path, key: str, flags: str, said: str) -> None:
    text = f"model: m\nprefill: 1\n{key % flags}\n"
    text += "" if "decode" in key else "decode: 1\n"
    with pytest.raises(LaunchError) as caught:
        planned(tmp_path, text)
    assert said in str(caught.value)
    name = "D0 is planned at 127.0.0.1:8300" if "decode" in key else "P0 is planned at 127.0.0.1:8100"
    assert name in str(caught.value) or "which is headless" in said
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("command", ["plan", "up --dry-run"])
@pytest.mark.parametrize("before", [["--"], ["--engine-args"], ["--prefill-args"], ["--decode-args"]])
def test_nor_can_the_command_line(command: str, before: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--port", "9000"] if before == ["--"] else ["--port 9000"]
    assert main([*command.split(), *before, *words]) == 2
    assert "and its flags have --port 9000: use the key port, or --prefill-port" in capsys.readouterr().err


@pytest.mark.parametrize(("flags", "said"), MOVED_PROXY)
def test_a_file_cannot_move_the_proxy_or_change_its_engines_by_a_flag(tmp_path: Path, flags: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(tmp_path, f"model: m\nproxy: {{flags: {flags}}}\nprefill: 1\ndecode: 1\n")
    assert str(caught.value).startswith("the proxy is planned at 127.0.0.1:8000, and its flags have ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "flags", ["--host 127.0.0.1 --port 8100", "--host 0.0.0.0", "--host=::", "--api-server-count 2"]
)
def test_who_says_the_same_again_or_listens_on_all_addresses_is_let(flags: str) -> None:
    check_doors(plan(PlanRequest(model="m", prefill_args=tuple(flags.split()))))


def test_flags_that_only_begin_alike_are_let() -> None:
    words = "--hf-overrides {} --served-model-name --uds-like --pipeline-parallel-size 1 --enable-log-requests"
    cluster = plan(PlanRequest(model="m", common_args=tuple(words.split()), proxy_flags=("--prefill-policy", "random")))
    check_doors(cluster)


def test_a_proxy_that_is_started_by_hand_takes_tls_from_its_file(tmp_path: Path) -> None:
    found = read_cluster_file(file(tmp_path, "model: m\nproxy: {flags: --ssl-certfile x}\nprefill: 1\ndecode: 1\n"))
    assert found.proxy.words() == ("--ssl-certfile", "x")
