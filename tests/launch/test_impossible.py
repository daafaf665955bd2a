"""Combinations that cannot work, typed as a user types them: refused with both values before anything is started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.cli import main
from tests.ports import free_ports

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
}
BOTH_WAYS = """--kv-transfer-config '{"kv_connector_extra_config": {"bidirectional_kv_xfer": true}}'"""

STALLING = """--kv-transfer-config '{"kv_connector_extra_config": {"push_stall_seconds": 40}}'"""


def drafting(model: str) -> str:
    return f"--speculative-config '{json.dumps({'method': 'eagle3', 'model': model, 'num_speculative_tokens': 3})}'"


class Started(Exception):
    """An engine would have been started."""


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr("os.execvpe", start)
    monkeypatch.setattr("baton.launch.Operator.begin", start)
    monkeypatch.setattr("baton.launch.preflight.available_bytes", lambda: 1 << 50)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    yield tmp_path


def up(model: Path, prefill: str, decode: str, *words: str) -> int:
    """`baton up` with flags for each role; *words* for both."""
    names = ("--port", "--prefill-port", "--decode-port", "--prefill-side-channel-port", "--decode-side-channel-port")
    ports = [word for name, port in zip(names, free_ports(5), strict=True) for word in (name, str(port))]
    logs = ("--log-dir", str(model / "logs"))
    return main(["up", str(model), *ports, *logs, "--prefill-args", prefill, "--decode-args", decode, *words])


def up_by_file(model: Path, prefill: str, decode: str, **more: Any) -> int:
    """The same as a cluster file."""
    proxy, *rest = free_ports(5)
    roles = {
        role: [{"port": port, "side_channel_port": side, "engine_args": flags}]
        for role, flags, port, side in (("prefill", prefill, *rest[:2]), ("decode", decode, *rest[2:]))
    }
    file = model / "cluster.json"
    file.write_text(json.dumps({"model": str(model), "proxy": {"port": proxy}, **roles, **more}))
    return main(["up", "--cluster", str(file), "--log-dir", str(model / "logs")])


def engine(model: Path, role: str, flags: str) -> int:
    """`baton engine` alone."""
    port, side = free_ports(2)
    words = ["engine", str(model), "--role", role, "--port", str(port), "--side-channel-port", str(side)]
    return main([*words, *shlex.split(flags)])


PAIRS = [
    ("--tensor-parallel-size 5", "", ["--tensor-parallel-size 5", "12 attention heads", "1, 2, 3, 4, 6, 12"]),
    ("-tp 2", "-tp 3", ["prefill servers with --tensor-parallel-size 2 and decode servers with 3"]),
    ("", "--pipeline-parallel-size 2", ["--pipeline-parallel-size is 2 on D0", "--tensor-parallel-size"]),
    ("-pp 2", "", ["--pipeline-parallel-size is 2 on P0", "on CPU"]),
    ("", "--enable-expert-parallel", ["--enable-expert-parallel", "LlamaForCausalLM"]),
    ("", drafting("/a"), ["decode drafts with 'eagle3' and prefill has no --speculative-config"]),
    (drafting("/a"), drafting("/b"), ["says model '/a' for prefill and '/b' for decode"]),
    ("--block-size 32", "--block-size 64", ["--block-size is 32 on P0 and 64 on D0"]),
    ("--block-size 32", "", ["--block-size is 32 on P0 and 128 on D0"]),
    ("--dtype float32", "--dtype float16", ["--dtype is float32 on P0 and float16 on D0"]),
    ("--kv-cache-dtype fp8", "", ["--kv-cache-dtype is fp8 on P0 and auto on D0"]),
    ("--max-model-len 1024", "--max-model-len 512", ["--max-model-len is 1024 on P0 and 512 on D0"]),
]


@pytest.mark.parametrize("start", [up, up_by_file])
@pytest.mark.parametrize(("prefill", "decode", "said"), PAIRS)
def test_a_pair_that_cannot_hand_over_is_refused(
    start: Any, model: Path, capsys: pytest.CaptureFixture[str], prefill: str, decode: str, said: list[str]
) -> None:
    assert start(model, prefill, decode) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert [each for each in said if each not in line] == []


def test_experts_that_the_ranks_do_not_divide_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "num_experts": 8}))
    assert up(model, "", "--data-parallel-size 3 --enable-expert-parallel") == 2
    assert "cannot spread the 8 experts" in (line := capsys.readouterr().err)
    assert "over 3 ranks" in line


def test_pushing_both_ways_is_refused_however_it_is_said(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By flags, in the cluster file, in vLLM's words for one role, and for one engine alone."""
    assert up(model, "", "", "--transfer-mode", "write", "--bidirectional-kv") == 2
    assert up_by_file(model, "", "", transfer_mode="write", bidirectional_kv=True) == 2
    assert up(model, "", BOTH_WAYS, "--transfer-mode", "write") == 2
    assert engine(model, "decode", "--transfer-mode write --bidirectional-kv") == 2
    assert engine(model, "decode", f"--transfer-mode write {BOTH_WAYS}") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all("bidirectional" in line and "write mode" in line and "read" in line for line in lines)


@pytest.mark.parametrize(
    ("role", "flags", "said"),
    [
        ("prefill", "--tensor-parallel-size 5", "--tensor-parallel-size 5 does not divide the model's 12 attention"),
        ("decode", "-pp 2", "--pipeline-parallel-size is 2 on this decode server"),
        ("prefill", "-pp 2", "--pipeline-parallel-size is 2 on this prefill server, which on CPU"),
        ("decode", "--enable-expert-parallel", "--enable-expert-parallel spreads experts over ranks"),
        ("decode", "--block-size 16", "--block-size 16: attention on CPU takes multiples of 32 tokens"),
        (
            "decode",
            f"--transfer-mode write {STALLING}",
            "push_answer_seconds 30 must be twice push_stall_seconds 40 or more",
        ),
    ],
)
def test_one_engine_that_could_work_with_no_other_is_refused(
    model: Path, capsys: pytest.CaptureFixture[str], role: str, flags: str, said: str
) -> None:
    assert engine(model, role, flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_what_fits_would_be_started(model: Path) -> None:
    """So that the refusals above are for what they say."""
    for start in (up, up_by_file):
        with pytest.raises(Started):
            start(model, "-tp 2 --max-model-len 512", "-tp 4 --max-model-len 1024")
    for role in ("prefill", "decode"):
        with pytest.raises(Started):
            engine(model, role, "-tp 2")
