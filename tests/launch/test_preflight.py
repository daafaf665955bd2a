from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path

import pytest

from baton.launch import Command, EngineInstall
from baton.launch.preflight import (
    ENGINE_OVERHEAD_BYTES,
    check_install,
    check_memory,
    check_ports,
    estimate_bytes,
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


def engine(folder: Path, *flags: str) -> Command:
    return Command({}, ("python", "-m", "baton.engine.serve", str(folder), *flags))


def test_memory_is_weights_kv_and_overhead(tmp_path: Path) -> None:
    assert estimate_bytes(engine(tmp_path, "--kv-cache-memory-bytes", "500"), {}) == 500 + ENGINE_OVERHEAD_BYTES
    assert estimate_bytes(engine(tmp_path), {"VLLM_CPU_KVCACHE_SPACE": "2"}) == (2 << 30) + ENGINE_OVERHEAD_BYTES


def test_too_little_memory_says_how_much_and_what_to_do(tmp_path: Path) -> None:
    (problem,) = check_memory([engine(tmp_path, "--kv-cache-memory-bytes", str(10**14))] * 2, {})
    assert "the engines need about 200003.2 GB" in problem.what
    assert "--kv-cache-memory-bytes" in problem.what
    assert check_memory([], {}) == []


def test_a_taken_port_names_its_owner_and_who_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (problem,) = check_ports([("127.0.0.1", port, "P0's API"), ("127.0.0.1", 0, "nobody")])
    assert f"port {port} for P0's API is not free" in problem.what
    assert f"pid {os.getpid()}" in problem.what


def test_missing_packages_are_named_with_the_remedy() -> None:
    found = check_install(EngineInstall("", "", "cpu", has_nixl=False))
    assert ["no vLLM is installed" in found[0].what, "nixl package is missing" in found[1].what] == [True, True]
    assert check_install(EngineInstall("vllm", "0.32.0", "accelerator", has_nixl=True)) == []
