"""Wrong words and a machine that isn't fit: one clear line on stderr and the right exit code."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from baton.cli.parser import Failure
from baton.cli.proxy import check_distinct, pair, wants_turns
from baton.cluster import Endpoint, Role
from baton.launch import EngineInstall
from baton.proxy import BreakerRules, ProxySettings
from tests import ports


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    err = capsys.readouterr().err
    return code, err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["upp"], "invalid choice: 'upp'"),
        (["up", "--promt", "x"], "unknown argument '--promt': did you mean --prompt?"),
        (["up", "--prefill", "0"], "'0' is not a whole number of 1 or more"),
        (["up", "--port", "80000"], "'80000' is not a port number"),
        (["up", "--prefill-port", "8000"], "port 8000 is planned for the proxy and for P0's API"),
        (["up", "--engine-args", "'"], '--engine-args "\'": No closing quotation'),
        (["engine", "m"], "the following arguments are required: --role"),
        (["engine", "m", "--role", "both"], "invalid choice: 'both'"),
        (["engine", "m", "--role", "decode", "--cpus", "999"], "'999' names cores that are not here"),
        (["engine", "m", "--role", "decode", "--transfer-backend", "ucx"], "invalid choice: 'ucx'"),
        (["up", "--nixl-threads", "few"], "'few' is not a whole number of 0 or more"),
        (["engine", "m", "n", "--role", "decode"], "unexpected word 'n' after MODEL"),
        (["proxy", "--prefiler-ports", "1"], "unknown argument '--prefiler-ports': did you mean --prefiller-ports?"),
        (["proxy", "--prefiller-ports", "0"], "'0' is not a port number"),
        (
            ["proxy", "--prefiller-hosts", "a", "b", "--prefiller-ports", "1", "2", "3"],
            "2 prefill hosts (a b) and 3 ports (1 2 3) don't pair",
        ),
        (["proxy", "--prefiller-ports", "8200"], "127.0.0.1:8200 is named twice, as a prefill and as a decode server"),
        (["proxy", "--port", "8100"], "127.0.0.1:8100 is this proxy's own address"),
        (["proxy", "--prefill", "ftp://x"], "--prefill 'ftp://x' is not a URL"),
        (["proxy", "--policy", "best"], "invalid choice: 'best'"),
        (["proxy", "--policy", "cache_aware"], "invalid choice: 'cache_aware' (choose from 'least_loaded', "),
        (["proxy", "--instances-file", "/nowhere"], "--instances-file /nowhere cannot be read: No such file"),
        (["proxy", "--instances-file", "/dev/null"], "--instances-file /dev/null: it holds no list such as"),
        (["proxy", "--instances-file", "f", "--decode", "http://h"], "--instances-file f names the engines: leave"),
        (["proxy", "--health-check-endpoint", "health"], "'health' is not a path such as /health"),
        (["proxy", "--health-check-timeout-secs", "0"], "'0' is not a positive number of seconds"),
        (["proxy", "--cb-failure-threshold", "0"], "'0' is not a whole number of 1 or more"),
        (["proxy", "--transfer-mode", "push"], "invalid choice: 'push' (choose from 'auto', 'read', 'write')"),
        (["proxy", "--api-key-file", "/nowhere"], "--api-key-file /nowhere: No such file or directory"),
        (["proxy", "--api-key-file", "/dev/null"], "there is no key in /dev/null"),
        (["proxy", "--ssl-keyfile", "x"], "--ssl-keyfile needs --ssl-certfile"),
        (["proxy", "--ssl-certfile", "/nowhere"], "--ssl-certfile /nowhere: No such file or directory"),
        (["proxy", "--decode", "https://h", "--engine-ca-file", "/nowhere"], "--engine-ca-file /nowhere: No such file"),
        (["proxy", "--uds", "/tmp/x", "--workers", "2"], "--uds and --workers don't go together"),
        (["proxy", "--retry-max-retries", "-1"], "'-1' is not a whole number of 0 or more"),
        (["proxy", "--retry-initial-backoff-ms", "-1"], "'-1' is not a number of milliseconds, 0 or more"),
        (["proxy", "--retry-max-backoff-ms", "nan"], "'nan' is not a number of milliseconds, 0 or more"),
        (["proxy", "--retry-backoff-multiplier", "0.5"], "'0.5' is not a factor of 1 or more"),
        (["proxy", "--retry-jitter-factor", "2"], "'2' is not a number from 0 to 1"),
        (["proxy", "--ticket-max-age-secs", "0"], "'0' is not a positive number of seconds"),
        (
            ["proxy", "--retry-max-backoff-ms", "10"],
            "--retry-max-backoff-ms 10 is less than --retry-initial-backoff-ms 50",
        ),
        (["proxy", "--queue-size", "-1"], "'-1' is not a whole number of 0 or more"),
        (["proxy", "--queue-size", "x"], "'x' is not a whole number of 0 or more"),
        (["proxy", "--sse-keepalive-secs", "0"], "'0' is not a positive number of seconds"),
        (["proxy", "--turns", "--workers", "2"], "--turns and --workers 2 don't go together: each worker would know"),
        (["proxy", "--client-tickets", "--workers", "2"], "use --workers 1 or --no-turns"),
        (["proxy", "--client-tickets", "--no-turns"], "--client-tickets and --no-turns contradict each other"),
        (["proxy", "--turn-ttl-seconds", "0"], "'0' is not a positive number of seconds"),
        (["proxy", "--max-turns", "0"], "'0' is not a whole number of 1 or more"),
        (["up", "--name", "a/b"], "--name 'a/b': a cluster's name is 1 to 64 letters"),
        (["up", "--restart", "always"], "invalid choice: 'always' (choose from 'on-failure', 'never')"),
        (["plan", "--prefill", "1000000000"], "'1000000000' is more than 4096 servers: give fewer"),
        (["scale", "--decode", "1000000000"], "'1000000000' is more than 4096 servers: give fewer"),
        (["init", "--decode", "1000000000"], "'1000000000' is more than 4096 servers: give fewer"),
        (
            ["plan", "--", "--data-parallel-size", "1000000000"],
            "--data-parallel-size 1000000000 is more than 4096 ranks",
        ),
        (["plan", "--", "-tp", "4000", "-pp", "4000"], "one engine come to 16000000 workers, and 4096 is the most"),
        (["engine", "m", "--role", "decode", "--cpus", "0-99999999999"], "'0-99999999999' goes beyond 65535"),
        (["engine", "m", "--role", "decode", "--cpus", "\u00b2"], "'\u00b2' is not a core number"),
        (["proxy", "--port", "\u00b2"], "'\u00b2' is not a port number (1 to 65535)"),
        (["proxy", "--queue-size", "\u00b2"], "'\u00b2' is not a whole number of 0 or more"),
        (["proxy", "--port", "9" * 5000], "is not a port number (1 to 65535)"),
        (["plan", ""], "MODEL is empty, as a variable is that was never set: name one, or leave it out"),
        (["up", "--dry-run", "m", "--host", ""], "--host is empty, as a variable is that was never set"),
        (["plan", "-f", "~nobody-here/x"], "--cluster '~nobody-here/x': there is no such home: write the path out"),
        (["proxy", "-f", "~nobody-here/x"], "--cluster '~nobody-here/x': there is no such home"),
        (["init", "~nobody-here/x"], "FILE '~nobody-here/x': there is no such home"),
        (["scale"], "say how many: --prefill N, --decode N, or both"),
        (["scale", "--decode", "0"], "'0' is not a whole number of 1 or more"),
        (["restart"], "name instances, or give --all"),
        (["restart", "D0", "--all"], "name instances, or give --all"),
        (["drain"], "the following arguments are required: ID"),
        (["status", "--admin-key", "k"], "--admin-key goes with --proxy"),
        (["model", "path", "nope"], "there is no embedded model 'nope'; there is: smollm2-135m-instruct"),
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = call(capsys, *words)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("baton: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port=\u00b2"], "--port '\u00b2' is not a whole number"),
        (["--data-parallel-size", "1000000000"], "--data-parallel-size 1000000000 is more than 4096 ranks: give fewer"),
        (
            ["--kv-transfer-config", '{"kv_connector_extra_config":5}'],
            "kv_connector_extra_config 5 in --kv-transfer-config is not an object: write {...}",
        ),
        (["--additional-config", '{"a":' + "9" * 5000 + "}"], "a number in it is too long, or it is nested too deep"),
        (["--kv-transfer-config", "[" * 100_000], "a number in it is too long, or it is nested too deep"),
    ],
)
def test_an_engines_wrong_flags_are_one_line(
    model: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = call(capsys, "engine", model, "--role", "decode", "--dry-run", *words)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("~nobody-here/x", "there is no model at '~nobody-here/x': there is no such home: give another path"),
        ("x" * 5000, f"there is no model at '{'x' * 77}...': File name too long: give another path"),
    ],
)
def test_a_model_at_a_path_that_cannot_be_is_one_line(path: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "plan", path) == (1, f"baton: {said}\n")


def test_other_folders_of_nobodys_home_are_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = call(capsys, "plan", model, "--output", "~nobody-here/x")
    assert (code, err) == (2, "baton: --output '~nobody-here/x': there is no such home: write the path out\n")
    monkeypatch.setenv("BATON_CACHE", "~nobody-here/x")
    code, err = call(capsys, "plan")
    assert (code, err) == (1, "baton: BATON_CACHE='~nobody-here/x': there is no such home: write the path out\n")


def test_a_folder_that_cannot_be_written_to_ends_up_in_one_line(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fails(*_: Any, **__: Any) -> int:
        raise IsADirectoryError(21, "Is a directory", f"{tmp_path}/P0.log")

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("baton.cli.up._up", fails)
    monkeypatch.setattr("baton.cli.up.check_cluster", lambda *_, **__: [])
    code, err = call(capsys, "up", model, "--log-dir", str(tmp_path))
    assert (code, err.count("\n")) == (1, 1)
    assert f"Is a directory: '{tmp_path}/P0.log': mend that, or name other folders with --log-dir" in err


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--block-size"])
def test_what_python_takes_for_a_digit_and_not_for_a_number_is_left_to_vllm(
    model: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "plan", model, "--", flag, "\u00b2") == (0, "")


@pytest.mark.parametrize("name", ["VLLM_CPU_KVCACHE_SPACE", "VLLM_NIXL_SIDE_CHANNEL_PORT"])
def test_so_is_a_variable_refused(
    model: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "\u00b2")
    code, err = call(capsys, "engine", model, "--role", "decode", "--dry-run")
    assert (code, err.count("\n")) == (2, 1)
    assert "'\u00b2' is not a" in err


@pytest.mark.parametrize("words", [["status"], ["logs", "D0"], ["scale", "--decode", "2"], ["drain", "D0"], ["down"]])
def test_without_a_cluster_there_is_nothing_to_command(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert call(capsys, *words) == (1, "baton: no cluster 'default' is running: start one with `baton up`\n")


@pytest.mark.parametrize("command", ["up", "engine"])
def test_a_wrong_model_path_is_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    role = ["--role", "decode"] if command == "engine" else []
    code, err = call(capsys, command, "/no/such/model", *role)
    assert code == 1
    assert err.startswith("baton: there is no model at '/no/such/model'. Give a folder")
    assert err.count("\n") == 1


def test_a_taken_port_is_one_line_and_names_both(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, err = call(capsys, "up", model, "--port", str(port), *free_ports())
    assert code == 1
    assert f"port {port} for the proxy is not free on 127.0.0.1" in err
    assert err.count("\n") == 1


def test_all_problems_are_said_at_once(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.cli.up.installed_engine", lambda: EngineInstall("", "", "cpu", has_nixl=False))
    code, err = call(capsys, "up", model, *free_ports(), "--", "--kv-cache-memory-bytes", str(10**15))
    assert code == 1
    lines = err.splitlines()
    assert len(lines) == 3
    assert "no vLLM is installed" in lines[0]
    assert "the nixl package is missing" in lines[1]
    assert "too little memory" in lines[2]


def test_flags_that_contradict_the_role_fail_before_anything_starts(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"kv_role": "kv_producer"})
    code, err = call(capsys, "engine", model, "--role", "decode", "--kv-transfer-config", config)
    assert code == 2
    assert "--role decode means kv_role 'kv_consumer'" in err


def test_a_dry_run_prints_and_starts_nothing(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", model, "--dry-run", "--", "--max_num_seqs", "8"]) == 0
    out = capsys.readouterr().out
    assert out.count("--max-num-seqs 8") == 2
    assert [line for line in out.splitlines() if line.startswith("# ")] == ["# P0", "# D0", "# proxy"]


def test_a_proxy_on_a_taken_port_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        code, err = call(capsys, "proxy", "--port", str(server.getsockname()[1]))
    assert code == 1
    assert "cannot listen on http://127.0.0.1" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("hosts", "ports", "made"),
    [
        (None, None, ["127.0.0.1:8100"]),
        (None, [1, 2], ["127.0.0.1:1", "127.0.0.1:2"]),
        (["a", "b"], [1], ["a:1", "b:1"]),
        (["a"], [1, 2], ["a:1", "a:2"]),
        (["a", "b"], [1, 2], ["a:1", "b:2"]),
        (["[::1]"], [1], ["[::1]:1"]),
        (["::1"], [1], ["[::1]:1"]),
    ],
)
def test_hosts_and_ports_pair_by_position(hosts: list[str] | None, ports: list[int] | None, made: list[str]) -> None:
    assert [each.authority for each in pair(Role.PREFILL, hosts, ports, [])] == made


def test_urls_stand_beside_lists() -> None:
    assert [each.authority for each in pair(Role.DECODE, None, None, ["http://h:1", "http://[::1]:2/"])] == [
        "h:1",
        "[::1]:2",
    ]
    assert [each.authority for each in pair(Role.DECODE, ["a"], [3], ["http://h"])] == ["a:3", "h:80"]


def test_one_server_in_one_pool_twice_is_refused() -> None:
    twice = [Endpoint(role=Role.PREFILL, host="a", port=1)] * 2
    with pytest.raises(Failure, match="named twice"):
        check_distinct(twice, "127.0.0.1", 8000)


def asked(**words: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"turns": None, "client_tickets": False, "workers": 1, **words})


@pytest.mark.parametrize("name", ["VLLM_NEURON_BIDIRECTIONAL_KV", "BATON_BIDIRECTIONAL_KV"])
@pytest.mark.parametrize(
    ("value", "words", "on"),
    [
        (None, {}, False),
        (None, {"turns": True}, True),
        (None, {"client_tickets": True}, True),
        ("", {}, False),
        ("0", {}, False),
        ("0", {"turns": True}, True),
        ("1", {}, True),
        ("1", {"turns": False}, False),
        ("1", {"turns": False, "workers": 2}, False),
    ],
)
def test_turns_are_turned_on_by_flag_or_variable_and_the_flag_wins(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, words: dict[str, Any], on: bool
) -> None:
    if value is not None:
        monkeypatch.setenv(name, value)
    assert wants_turns(asked(**words)) is on


@pytest.mark.parametrize("name", ["VLLM_NEURON_BIDIRECTIONAL_KV", "BATON_BIDIRECTIONAL_KV"])
@pytest.mark.parametrize(
    ("value", "said"),
    [("1", "=1 and --workers 2 don't go together"), ("yes", "=yes: 1 turns it on, 0 off")],
)
def test_a_variable_that_cannot_be_heeded_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(Failure, match=name + said):
        wants_turns(asked(workers=2))


def settings_made(monkeypatch: pytest.MonkeyPatch, *words: str) -> ProxySettings:
    """What `baton proxy` would serve with."""
    made: list[ProxySettings] = []
    monkeypatch.setattr("baton.cli.proxy.serve", lambda settings, on_ready: made.append(settings))
    monkeypatch.setattr("baton.cli.proxy._run", lambda work: None)
    assert main(["proxy", *words]) == 0
    return made[0]


def test_flags_of_health_reach_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        *("--health-check-interval-secs", "9", "--health-check-timeout-secs", "8", "--health-failure-threshold", "7"),
        *("--health-success-threshold", "6", "--health-check-endpoint", "/ping", "--cb-failure-threshold", "5"),
        *("--cb-success-threshold", "4", "--cb-timeout-duration-secs", "3", "--cb-window-duration-secs", "2"),
    )
    made = settings_made(monkeypatch, *words)
    assert (made.probe_interval_seconds, made.probe_timeout_seconds) == (9.0, 8.0)
    assert (made.probe_failures, made.probe_successes, made.probe_path) == (7, 6, "/ping")
    assert made.breaker == BreakerRules(5, 4, 3.0, 2.0, enabled=True)
    made = settings_made(monkeypatch, "--disable-circuit-breaker", "--policy", "least_loaded")
    assert not made.breaker.enabled
    assert made.policy == "least_loaded"


def test_engines_come_from_a_file_of_their_own_before_those_of_a_cluster_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cluster, instances = tmp_path / "c.json", tmp_path / "i.json"
    cluster.write_text(json.dumps({"model": "m", "prefill": [{"host": "a"}], "decode": [{"host": "b"}]}))
    instances.write_text(json.dumps([{"role": "prefill", "url": "http://c:1"}, {"role": "decode", "url": "https://d"}]))
    made = settings_made(monkeypatch, "--cluster", str(cluster), "--instances-file", str(instances))
    assert [each.url for each in made.endpoints] == ["http://c:1", "https://d:443"]
    assert made.instances_file == str(instances)
    assert made.engine_tls is not None


def test_a_proxy_may_open_as_many_files_as_the_system_lets_it() -> None:
    code = (
        "import resource; from baton.cli.proxy import allow_descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); allow_descriptors(); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "(512, 512)"


def free_ports() -> list[str]:
    """Flags that move a cluster's ports to free ones."""
    flags = ["--prefill-port", "--decode-port", "--prefill-side-channel-port", "--decode-side-channel-port"]
    return [word for pair in zip(flags, map(str, ports.free_ports(len(flags))), strict=True) for word in pair]
