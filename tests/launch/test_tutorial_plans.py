"""The plans of the tutorials for Trainium: every word of their commands is in what Baton would run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from baton.cluster import Cluster
from baton.launch import (
    Command,
    EngineInstall,
    Flags,
    check_plan,
    cluster_commands,
    flag_value,
    plan_file,
    read_cluster_file,
)
from baton.models import ResolvedModel

EXAMPLES = Path(__file__).parents[2] / "examples"
INSTALL = EngineInstall("", "", "cpu", has_nixl=False)
MODEL = ResolvedModel("openai/gpt-oss-20b", "openai/gpt-oss-20b", local=False)

# As the tutorial has them, but for `vllm serve $MODEL`, which is `baton engine`'s own start.
PREFILL = """
NEURON_VISIBLE_DEVICES=0-7 VLLM_NIXL_SIDE_CHANNEL_PORT=5559
    --port 8100
    --tensor-parallel-size 8
    --max-num-seqs 1
    --max-model-len 4096
    --max-num-batched-tokens 4096
    --no-enable-chunked-prefill
    --no-enable-prefix-caching
    --additional-config '{"nixl_side_channel_port": 5559, "neuron_config": {"on_device_sampling_config": {"all_greedy": true}, "num_batched_tokens_buckets": [4096], "num_seqs_buckets": [1]}}'
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cuda", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}'
    --hf-overrides '{"quantization_config": {}}'
"""  # noqa: E501
DECODE = """
NEURON_VISIBLE_DEVICES=8-39 VLLM_NIXL_SIDE_CHANNEL_PORT=5659
    --port 8200
    --tensor-parallel-size 8
    --data-parallel-size 4
    --enable-expert-parallel
    --max-num-seqs 1
    --max-model-len 4096
    --max-num-batched-tokens 4096
    --no-enable-chunked-prefill
    --no-enable-prefix-caching
    --additional-config '{"nixl_side_channel_port": 5659, "neuron_config": {"on_device_sampling_config": {"all_greedy": true}, "num_batched_tokens_buckets": [4096], "num_seqs_buckets": [1]}}'
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cuda", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}'
    --hf-overrides '{"quantization_config": {}}'
"""  # noqa: E501
PREFILL_ON_A_HOST = """
VLLM_NIXL_SIDE_CHANNEL_PORT=5559
    --port 8100
    --tensor-parallel-size 8
    --max-num-seqs 4
    --max-model-len 8192
    --max-num-batched-tokens 8192
    --no-enable-prefix-caching
    --hf-overrides '{"quantization_config": {}}'
    --additional-config '{"nixl_side_channel_port": 5559, "neuron_config": {"num_batched_tokens_buckets": [8192], "num_seqs_buckets": [4]}}'
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_buffer_device": "cuda", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}'
"""  # noqa: E501
DECODE_ON_A_HOST = """
VLLM_NIXL_SIDE_CHANNEL_PORT=5659
    --port 8200
    --tensor-parallel-size 8
    --max-num-seqs 4
    --max-model-len 8192
    --max-num-batched-tokens 8192
    --no-enable-prefix-caching
    --hf-overrides '{"quantization_config": {}}'
    --additional-config '{"nixl_side_channel_port": 5659, "neuron_config": {"num_batched_tokens_buckets": [8192], "num_seqs_buckets": [4]}}'
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cuda", "kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}'
"""  # noqa: E501

# What Baton says beyond the tutorial: its own connector and what becomes of a failed load; a name for clients; where it
# listens. 0.0.0.0 for the side channel, as the tutorial exports, would be told to peers: a real address is.
OURS = {"--served-model-name", "--host"}
OUR_TRANSFER = {"kv_connector_module_path": "baton.engine.connector", "kv_load_failure_policy": "fail"}
OUR_ENVIRON = {"BATON_ENGINE", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NO_USAGE_STATS", "VLLM_HOST_IP"}


def planned(name: str) -> tuple[Cluster, dict[str, Command]]:
    cluster = plan_file(read_cluster_file(EXAMPLES / name), Flags(), (0, 1))
    commands = cluster_commands(cluster, MODEL, INSTALL, {})
    engines = [commands[each.id] for each in cluster.instances]
    assert check_plan(cluster, engines, INSTALL, local_model=False) == []
    return cluster, commands


def flags_of(words: list[str]) -> dict[str, Any]:
    """Flags by name; the values of JSON as JSON."""
    found: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            found[name := word] = True
        else:
            found[name] = json.loads(word) if word.startswith("{") else word
    return found


def is_the_tutorials(command: Command, text: str) -> None:
    words = shlex.split(text)
    variables = dict(word.split("=", 1) for word in words if not word.startswith("--") and "=" in word.split("{")[0])
    theirs = flags_of([word for word in words if word.partition("=")[0] not in variables])
    ours = flags_of(list(command.argv[4:]))
    transfer = ours["--kv-transfer-config"]
    for key, value in OUR_TRANSFER.items():
        assert transfer.pop(key) == value
    assert {name: value for name, value in ours.items() if name not in OURS} == theirs
    assert {name: value for name, value in command.environ.items() if name not in OUR_ENVIRON} == variables


def test_1p1d_on_one_trainium_host() -> None:
    _, commands = planned("neuron-1p1d.yaml")
    is_the_tutorials(commands["P0"], PREFILL)
    is_the_tutorials(commands["D0"], DECODE)
    assert " ".join(commands["proxy"].argv[3:]) == (
        "proxy --host 127.0.0.1 --port 8000 --prefiller-hosts 127.0.0.1 --prefiller-ports 8100 "
        "--decoder-hosts 127.0.0.1 --decoder-ports 8200"
    )


def test_1p1d_on_two_hosts() -> None:
    _, commands = planned("neuron-1p1d-hosts.yaml")
    is_the_tutorials(commands["P0"], PREFILL_ON_A_HOST)
    is_the_tutorials(commands["D0"], DECODE_ON_A_HOST)
    assert commands["P0"].environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.1.10"
    assert commands["D0"].environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.1.20"


def test_2p3d_on_five_hosts() -> None:
    cluster, commands = planned("neuron-2p3d-hosts.yaml")
    assert {each.id: each.host for each in cluster.instances} == {
        "P0": "10.0.1.10",
        "P1": "10.0.1.11",
        "D0": "10.0.1.20",
        "D1": "10.0.1.21",
        "D2": "10.0.1.22",
    }
    for name, command in commands.items():
        if name != "proxy":
            is_the_tutorials(command, PREFILL_ON_A_HOST if name.startswith("P") else DECODE_ON_A_HOST)
    assert " ".join(commands["proxy"].argv[3:]) == (
        "proxy --host 10.0.1.10 --port 8000 "
        "--prefiller-hosts 10.0.1.10 10.0.1.11 --prefiller-ports 8100 8100 "
        "--decoder-hosts 10.0.1.20 10.0.1.21 10.0.1.22 --decoder-ports 8200 8200 8200"
    )


def test_bidirectional_kv_sets_the_designs_variable() -> None:
    file = read_cluster_file(EXAMPLES / "neuron-1p1d.yaml")
    cluster = plan_file(file, Flags(bidirectional=True), (0,))
    commands = cluster_commands(cluster, MODEL, INSTALL, {})
    assert [commands[name].environ["VLLM_NEURON_BIDIRECTIONAL_KV"] for name in ("P0", "D0")] == ["1", "1"]


def test_the_side_channels_port_goes_into_the_users_own_config_once() -> None:
    file = read_cluster_file(EXAMPLES / "neuron-1p1d.yaml")
    commands = cluster_commands(plan_file(file, Flags(), (0,)), MODEL, INSTALL, {})
    assert commands["P0"].argv.count("--additional-config") == 1
    config = json.loads(flag_value(commands["P0"].argv, "--additional-config") or "")
    assert list(config) == ["nixl_side_channel_port", "neuron_config"]


@pytest.mark.parametrize(("device", "name"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("neuron", "NEURON_VISIBLE_DEVICES")])
def test_who_names_devices_himself_is_left_alone(tmp_path: Path, device: str, name: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"model: m\ndevice: {device}\nprefill: 1\ndecode: {{environ: {{{name}: GPU-1}}}}\n")
    commands = cluster_commands(plan_file(read_cluster_file(path), Flags(), (0,)), MODEL, INSTALL, {})
    assert [commands[each].environ[name] for each in ("P0", "D0")] == ["0", "GPU-1"]
