from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from baton.launch import Command, EngineInstall
from baton.launch.preflight import (
    ENGINE_OVERHEAD_BYTES,
    WORKER_OVERHEAD_BYTES,
    check_engine,
    check_experts,
    check_install,
    check_memory,
    check_ports,
    check_weights,
    estimate,
    estimates,
    expert_share,
    weight_bytes,
)


def save(path: Path, dtype: str, size: int) -> None:
    header = json.dumps({"__metadata__": {}, "w": {"dtype": dtype, "shape": [1], "data_offsets": [0, size]}}).encode()
    body = struct.pack("<Q", len(header)) + header
    path.write_bytes(body + b"\0" * (size - len(body)))


@pytest.mark.parametrize(("dtype", "factor"), [(None, 1), ("bfloat16", 1), ("float32", 2)])
def test_weights_are_counted_in_the_type_they_are_served_in(tmp_path: Path, dtype: str | None, factor: int) -> None:
    save(tmp_path / "a.safetensors", "BF16", 10_000)
    save(tmp_path / "b.safetensors", "BF16", 20_000)
    assert weight_bytes(tmp_path, dtype) == 30_000 * factor


def test_a_broken_weight_file_is_counted_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    assert weight_bytes(tmp_path, "float32") == 3


@pytest.mark.parametrize(
    "header", [b"[1]", b'{"w": 5}', b'{"w": {"dtype": "F32"}}', b'{"w": {"data_offsets": [1]}}', b"[" * 100_000]
)
def test_so_is_one_whose_header_is_another_things(tmp_path: Path, header: bytes) -> None:
    body = struct.pack("<Q", len(header)) + header
    (tmp_path / "a.safetensors").write_bytes(body)
    assert weight_bytes(tmp_path, "float32") == len(body)
    assert expert_share(tmp_path) == 0.0


def test_weights_that_are_a_link_to_nothing_are_a_problem(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "blob")
    (problem,) = check_weights([engine(tmp_path)] * 2)
    assert problem.what.startswith(f"{tmp_path}/a.safetensors: it is a link to {tmp_path}/blob: No such file")
    assert weight_bytes(tmp_path, None) == 0
    assert estimate(engine(tmp_path), {}).weights == 0


@pytest.mark.parametrize(
    "config",
    [
        {"layer_types": 5},
        {"text_config": {"layer_types": 5}},
        {"layer_types": [{}, []]},
        {"architectures": 5},
        {"architectures": [5]},
        {"block_configs": 5},
        {"block_configs": [{"n_routed_experts": "x"}]},
        {"num_experts": 10**12},
        {"num_attention_heads": 10**12 + 1},
    ],
)
def test_a_config_with_values_of_other_kinds_is_left_to_vllm(
    tmp_path: Path, config: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Whatever it finds: it ends, and soon.
    assert main(["plan", str(tmp_path), "--", "--enable-expert-parallel", "-tp", "2"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def engine(folder: Path, *flags: str) -> Command:
    return Command({}, ("python", "-m", "baton.engine.serve", str(folder), *flags))


def test_memory_is_weights_kv_and_overhead(tmp_path: Path) -> None:
    assert estimate(engine(tmp_path, "--kv-cache-memory-bytes", "500"), {}).total == 500 + ENGINE_OVERHEAD_BYTES
    assert estimate(engine(tmp_path), {"VLLM_CPU_KVCACHE_SPACE": "2"}).total == (2 << 30) + ENGINE_OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("text", "size"),
    [("500", 500), ("100G", 100 << 30), ("2g", 2 * 10**9), ("25.6k", 25_600), ("1T", 1 << 40), (" 1m ", 10**6)],
)
def test_the_kv_cache_is_counted_in_the_words_that_vllm_takes(tmp_path: Path, text: str, size: int) -> None:
    assert estimate(engine(tmp_path, "--kv-cache-memory-bytes", text), {}).kv_cache == size


def test_the_commands_own_environment_counts_and_wins_over_the_shells_and_the_flag(tmp_path: Path) -> None:
    argv = engine(tmp_path, "--kv-cache-memory-bytes", "500").argv
    own, shell = {"VLLM_CPU_KVCACHE_SPACE": "100000"}, {"VLLM_CPU_KVCACHE_SPACE": "1"}
    (problem,) = check_memory([Command(own, argv)], shell)
    assert "the engines need about 107375.3 GB" in problem.what
    assert "VLLM_CPU_KVCACHE_SPACE" in problem.what
    assert estimate(Command({}, argv), shell).kv_cache == 1 << 30
    assert estimates({"P0": Command(own, argv), "D0": Command({}, argv)}, shell)["D0"].kv_cache == 1 << 30


def test_a_large_vocabulary_takes_its_embedding_three_times_more(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": 300, "lm_head.weight": 200, "model.layers.0.mlp.up_proj.weight": 500}
    header, offset = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * offset)
    weights = (tmp_path / "a.safetensors").stat().st_size
    found = estimate(engine(tmp_path, "--kv-cache-memory-bytes", "500"), {})
    assert (found.weights, found.vocabulary) == (weights, int(0.9 * weights))
    assert found.total == weights + int(0.9 * weights) + 500 + ENGINE_OVERHEAD_BYTES


def test_every_worker_has_a_kv_cache_and_only_experts_are_shared_by_data_parallel_ranks(tmp_path: Path) -> None:
    tensors = {"layers.0.mlp.experts.0.up.weight": 600, "layers.0.mlp.shared_experts.up.weight": 100, "embed": 300}
    header, offset = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * offset)
    assert expert_share(tmp_path) == 0.6
    size = (tmp_path / "a.safetensors").stat().st_size
    flags = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--kv-cache-memory-bytes", "500")
    overhead = ENGINE_OVERHEAD_BYTES + 3 * WORKER_OVERHEAD_BYTES
    found = estimate(engine(tmp_path, *flags), {})
    assert (found.weights, found.vocabulary) == (size + int(size * 0.4), 0)
    assert found.total == size + int(size * 0.4) + 4 * 500 + overhead


def test_too_little_memory_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    (problem,) = check_memory([engine(tmp_path, "--kv-cache-memory-bytes", str(10**14))] * 2, {})
    assert "the engines need about 200002.2 GB" in problem.what
    assert "--kv-cache-memory-bytes" in problem.what
    assert check_memory([], {}) == []


def test_a_taken_port_names_its_owner_and_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = check_ports([("127.0.0.1", port, "P0's API"), ("127.0.0.1", 0, "nobody")])
    assert f"port {port} for P0's API is not free" in problem.what
    assert f"pid {os.getpid()}" in problem.what


def side_engine(port: int, side: int, *flags: str) -> Command:
    environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    return Command(environ, ("python", "-m", "baton.engine.serve", "m", "--port", str(port), *flags))


def test_the_side_channel_of_every_data_parallel_rank_is_looked_at() -> None:
    cpu = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
    flags = ("--host", "127.0.0.1", "--data-parallel-size", "2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def told(api: int, side: int) -> str:
            return "; ".join(each.what for each in check_engine(side_engine(api, side, *flags), cpu, local_model=False))

        assert f"port {port} for the side channel of rank 1 is not free" in told(1, port - 1)
        assert f"port {port} is planned for the API and for the side channel of rank 1" in told(port, port - 1)
        assert "the side channel's last port, 65536, is beyond 65535" in told(1, 65535)


def test_experts_without_a_model_of_experts_are_refused_before_any_model_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    cpu = EngineInstall("vllm-cpu", "0.32.0", "cpu", has_nixl=True)
    command = engine(tmp_path, "--enable-expert-parallel", "--served-model-name", "mine")
    (problem,) = check_experts([command, command], cpu)
    assert "mine (LlamaForCausalLM) has none" in problem.what
    assert problem.words


def test_missing_packages_are_named_with_the_remedy() -> None:
    found = check_install(EngineInstall("", "", "cpu", has_nixl=False))
    assert ["no vLLM is installed" in found[0].what, "nixl package is missing" in found[1].what] == [True, True]
    assert check_install(EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)) == []
