"""`baton plan` and `baton init`: what they print and write, and what they refuse."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from baton.cli import main
from baton.cli.init import _ask
from baton.cluster import Device, TransferMode
from baton.launch import Flags, Wish, plan_file, read_cluster_file, written
from tests.ports import free_ports

EXAMPLES = Path(__file__).parents[2] / "examples"
HOSTS = "model: /models/m\nhosts: {a: 10.0.0.1, b: 10.0.0.2}\nprefill: 1\ndecode: 1\n"


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts.yaml"
    path.write_text(HOSTS)
    return str(path)


def test_the_plan_is_what_up_would_start(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [model, "--prefill", "2", "--transfer-mode", "write", "--", "--max-num-seqs", "3"]
    assert main(["up", "--dry-run", *words]) == 0
    up = capsys.readouterr().out.strip()
    assert main(["plan", *words]) == 0
    plan = capsys.readouterr().out
    for command in up.split("\n\n"):
        assert command.partition("\n")[2] in plan
    first = plan.splitlines()
    assert first[0] == f"{model}: 2 prefill and 1 decode servers on 1 host, write mode"
    assert first[2:4][0] == "localhost"
    assert first[3].startswith("  P0     prefill  API and metrics 8100, side channel 5559; cores ")


def test_json_has_every_process_with_ports_devices_environment_and_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "-f", str(EXAMPLES / "neuron-1p1d.yaml"), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["device"], value["transfer_mode"], value["problems"]) == ("neuron", "read", [])
    (host,) = value["hosts"]
    prefill, decode, proxy = host["processes"]
    assert [each["port"] for each in decode["ports"]] == [8200, 5659, 5660, 5661, 5662]
    assert decode["devices"] == list(range(8, 40))
    assert (decode["ranks"], prefill["ranks"], proxy["role"]) == (32, 8, "proxy")
    assert prefill["environ"]["NEURON_VISIBLE_DEVICES"] == "0-7"
    assert prefill["argv"][1:4] == ["-m", "baton.engine.serve", "openai/gpt-oss-20b"]


def test_a_script_a_host_runs_that_hosts_share(hosts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", hosts, "--shell"]) == 2
    assert "--shell makes a script a host, and the plan has 2: choose one with --host a" in capsys.readouterr().err
    assert main(["plan", "-f", hosts, "--shell", "--host", "b"]) == 0
    script = capsys.readouterr().out
    assert "# D0 on b. " in script
    assert "# D0: API and metrics 8200, side channel 5659" in script
    assert main(["plan", "-f", hosts, "--output", str(tmp_path / "out")]) == 0
    paths = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.name for path in paths] == ["a.sh", "b.sh"]
    assert paths[1].read_text() == script
    assert all(path.stat().st_mode & stat.S_IXUSR for path in paths)
    for path in paths:
        subprocess.run(["sh", "-n", path], check=True)
    assert main(["plan", "-f", hosts, "--host", "c"]) == 2
    assert f"{hosts} plans 2 hosts (a, b): --host c is none of them" in capsys.readouterr().err


def test_hosts_whose_scripts_would_be_one_are_refused_before_any_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: /m\nhosts: {a/b: 10.0.0.1, a_b: 10.0.0.2}\nprefill: 1\ndecode: 1\n")
    assert main(["plan", "-f", str(path), "--output", str(tmp_path / "out")]) == 2
    assert f"the hosts a/b and a_b would both be {tmp_path}/out/a_b.sh: rename one" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_json_and_scripts_are_both_had_and_json_stands_alone_on_stdout(
    hosts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "-f", hosts, "--json", "--output", str(tmp_path / "out")]) == 0
    assert [host["name"] for host in json.loads(capsys.readouterr().out)["hosts"]] == ["a", "b"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.sh", "b.sh"]
    assert main(["plan", "--schema", "--output", str(tmp_path)]) == 2
    assert "--schema prints the schema and writes no scripts: leave --output out" in capsys.readouterr().err


def test_the_scripts_words_arrive_as_planned(hosts: str, tmp_path: Path) -> None:
    """Run with a program in Python's place that prints what it gets."""
    fake = tmp_path / "fake"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$VLLM_NIXL_SIDE_CHANNEL_HOST" "$@"\n')
    fake.chmod(0o755)
    assert main(["plan", "-f", hosts, "--output", str(tmp_path)]) == 0
    run = tmp_path / "run"
    run.mkdir()
    subprocess.run(["sh", tmp_path / "b.sh"], cwd=run, env={"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}, check=True)
    said = (run / "D0.log").read_text().splitlines()
    assert said[:4] == ["10.0.0.2", "-m", "baton.engine.serve", "/models/m"]
    assert json.loads(said[-1])["kv_role"] == "kv_consumer"


def test_the_end_of_a_script_ends_what_it_started_and_waits_for_it(hosts: str, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.write_text("#!/bin/sh\ntrap 'sleep 0.2; echo ended; exit' TERM\necho up\nwhile :; do sleep 0.05; done\n")
    fake.chmod(0o755)
    assert main(["plan", "-f", hosts, "--output", str(tmp_path)]) == 0
    environ = {"PYTHON": str(fake), "PATH": "/usr/bin:/bin"}
    logs = [tmp_path / "P0.log", tmp_path / "proxy.log"]
    script = subprocess.Popen(["sh", tmp_path / "a.sh"], cwd=tmp_path, env=environ, start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        while not all(log.exists() and log.read_text() for log in logs):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        script.terminate()
        script.wait(60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()
    assert [log.read_text().split() for log in logs] == [["up", "ended"]] * 2


def test_what_does_not_fit_is_said_below_the_plan(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", model, "--decode-args", "--block-size 32", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "--block-size is 128 on P0 and 32 on D0" in err
    assert json.loads(out)["problems"][0] in err


def test_check_looks_at_this_machine_too(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("--port", "--prefill-port", "--decode-port", "--prefill-side-channel-port", "--decode-side-channel-port")
    ports = [word for name, port in zip(names, free_ports(5), strict=True) for word in (name, str(port))]
    words = ["plan", model, *ports, "--", "--kv-cache-memory-bytes", str(10**15)]
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words[:2], "--check", *words[2:]]) == 1
    assert "too little memory" in capsys.readouterr().err


def test_check_counts_the_kv_cache_that_a_file_gives_an_engine(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    api, other, side, other_side, proxy = free_ports(5)
    path = tmp_path / "c.yaml"
    path.write_text(
        f"model: {model}\ndefaults: {{environ: {{VLLM_CPU_KVCACHE_SPACE: 100000}}}}\nproxy: {{port: {proxy}}}\n"
        f"prefill: {{port: {api}, side_channel_port: {side}}}\n"
        f"decode: {{port: {other}, side_channel_port: {other_side}}}\n"
    )
    assert main(["plan", "--check", "-f", str(path)]) == 1
    assert "too little memory: the engines need about 2147" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["x", "1.5G", "\u00b2", "9" * 5000, "-1", ""])
def test_a_kv_cache_of_a_size_that_is_none_is_refused(
    model: str, size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", model, "--", f"--kv-cache-memory-bytes={size}"]) == 2
    assert f"--kv-cache-memory-bytes {size!r} is not a number of bytes, such as" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", size)
    assert main(["plan", model]) == (2 if size else 0)
    assert not size or f"VLLM_CPU_KVCACHE_SPACE={size!r} is not a whole number of GiB" in capsys.readouterr().err


def test_hosts_are_shown_with_their_addresses(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-f", hosts]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines[:8] if line and line[0] != " "][1:] == ["a (10.0.0.1)", "b (10.0.0.2)"]
    assert main(["plan", "-f", hosts, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert [(host["name"], host["address"]) for host in value["hosts"]] == [("a", "10.0.0.1"), ("b", "10.0.0.2")]


def test_up_of_several_hosts_wants_to_know_which_it_is_on(hosts: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "-f", hosts]) == 2
    assert f"{hosts} plans 2 hosts (a, b): name the one that this is with --host" in capsys.readouterr().err
    assert main(["up", "-f", hosts, "--host", "c"]) == 2
    assert f"{hosts} plans 2 hosts (a, b): --host c is none of them" in capsys.readouterr().err
    assert main(["up", "-f", hosts, "--host", "b", "--prompt", "x"]) == 2
    assert "--prompt asks the proxy, which runs on a: give it there" in capsys.readouterr().err


def test_up_on_a_host_starts_its_share(hosts: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    shares = {}
    for host in ("a", "b"):
        assert main(["up", model, "-f", hosts, "--host", host, "--dry-run"]) == 0
        shares[host] = re.findall(r"^# (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert "proxy" in shares["a"] and "proxy" not in shares["b"]
    assert not set(shares["a"]) & set(shares["b"])


def test_a_collision_is_refused_with_both_owners(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--prefill-port", "8200"]) == 2
    assert "port 8200 is planned for P0's API and for D0's API" in capsys.readouterr().err


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--schema"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["additionalProperties"] is False
    assert {"hosts", "prefill", "decode", "proxy"} <= set(value["properties"])


# baton init


def test_init_writes_a_file_with_comments_that_reads_back_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "big.yaml"
    words = "--prefill 2 --decode 3 --model org/name --hosts 10.0.1.10 10.0.1.11 --device cuda --transfer-mode write"
    assert main(["init", str(path), *words.split(), "--decode-tensor-parallel-size", "2", "--port", "9000"]) == 0
    assert f"baton plan -f {path}" in capsys.readouterr().out
    text = path.read_text()
    assert "# Who moves the KV cache: read (decode servers pull) or write" in text
    cluster = plan_file(read_cluster_file(path), Flags(), (0, 1))
    assert (cluster.model, cluster.device, cluster.transfer_mode) == ("org/name", Device.CUDA, TransferMode.WRITE)
    assert [(each.id, each.host) for each in cluster.instances] == [
        ("P0", "10.0.1.10"),
        ("P1", "10.0.1.11"),
        ("D0", "10.0.1.10"),
        ("D1", "10.0.1.11"),
        ("D2", "10.0.1.10"),
    ]
    assert cluster.instances[2].engine_args == ("--tensor-parallel-size", "2")
    assert (cluster.proxy_host, cluster.proxy_port) == ("10.0.1.10", 9000)


def test_init_never_touches_a_file_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "baton.yaml"
    path.write_text("# mine\n")
    assert main(["init", str(path), "--decode", "2"]) == 2
    assert f"{path} exists, and its comments are yours" in capsys.readouterr().err
    assert path.read_text() == "# mine\n"
    assert main(["init", str(path), "--decode", "2", "--force"]) == 0
    assert "replicas: 2" in path.read_text()
    assert main(["init", str(path), "--hosts", "a", "a"]) == 2


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_init_writes_no_json(force: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keep.json"
    if force:
        path.write_text("{}")
    assert main(["init", str(path), "--decode", "2", *force]) == 2
    assert f"{path}: what is written is YAML with comments, and .json is read as JSON: call" in capsys.readouterr().err
    assert [each.read_text() for each in tmp_path.iterdir()] == (["{}"] if force else [])


def test_init_replaces_a_file_only_by_one_that_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("# mine\n")
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    monkeypatch.setattr("baton.cli.init.written", lambda *_: "model: [\n")
    assert main(["init", str(link), "--force"]) == 2
    assert f"{link}, line 2: not YAML: " in capsys.readouterr().err
    assert path.read_text() == "# mine\n"
    monkeypatch.undo()
    path.chmod(0o600)
    assert main(["init", str(link), "--force"]) == 0
    assert link.is_symlink() and "replicas: 1" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link.yaml", "mine.yaml"]
    assert main(["init", str(tmp_path), "--force"]) == 2
    assert f"{tmp_path} is no file: name another" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["org/name", "./m", "true", "123", "a b: #c", "/x/y-z_1.5"])
def test_any_model_is_written_so_that_it_reads_back(tmp_path: Path, model: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(written(Wish(model=model, hosts=("::1", "1.2")), "c.yaml"))
    file = read_cluster_file(path)
    assert file.model == model
    assert [host.address for host in file.hosts.values()] == ["::1", "1.2"]


def test_on_a_terminal_it_asks_and_asks_again(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter(["", "zero", "2", "", "10.0.0.1, 10.0.0.2", "gpu", "cuda", "", ""])
    wish = _ask(lambda _: next(answers))
    assert (wish.prefill, wish.decode, wish.hosts) == (2, 1, ("10.0.0.1", "10.0.0.2"))
    assert (wish.device, wish.transfer_mode, wish.port) == (Device.CUDA, TransferMode.READ, 8000)
    out = capsys.readouterr().out
    assert "'zero' is not a whole number of 1 or more" in out
    assert "'gpu' is none of cpu, cuda, neuron and -" in out


def test_the_shell_form_of_a_command_is_read_back_by_a_shell(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    odd = '{"a": "it\'s $HOME `x`"}'
    assert main(["plan", model, "--shell", "--", "--hf-overrides", odd]) == 0
    script = capsys.readouterr().out
    words = shlex.split(script.partition("# P0: ")[2].partition(" > P0.log")[0], comments=False)
    assert odd in words
