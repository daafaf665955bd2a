"""`baton up` as a person uses it: what it shows, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.engines import KV_BYTES_A_TOKEN
from tests.e2e.up import NOTHING, Up, clear

CPU_BLOCK = 128
"""vLLM's own block size on CPU, in tokens."""


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[list[Up]]:
    """Whatever a test starts is killed when the test fails."""
    made: list[Up] = []
    yield made
    for up in made:
        clear(up)


def test_a_newcomer_sees_an_answer_and_what_moved(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path, "--prompt", "Count the number 1, 2, 3", "--max-tokens", "12")
    ups.append(up)
    up.wait_for("loading weights")
    assert up.end() == 0, up.err.read_text()
    out = up.out.read_text()
    assert "Count the number 1, 2, 3, 4, 5, 6" in out
    assert f"prefill by P0, decode by D0; {CPU_BLOCK * KV_BYTES_A_TOKEN:,} bytes of KV cache moved" in out
    assert re.search(r"ready after \d+ s", out)
    assert "to keep it running: baton up" in out
    assert str(tmp_path / "logs") in out
    assert (tmp_path / "logs" / "P0.log").stat().st_size > 0
    assert up.err.read_text() == ""
    assert up.left_behind() == NOTHING


def test_in_write_mode_a_newcomer_sees_as_much(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path, "--transfer-mode", "write", "--prompt", "Count the number 1, 2, 3", "--max-tokens", "12")
    ups.append(up)
    up.wait_for("loading weights")
    assert up.end() == 0, up.err.read_text()
    out = up.out.read_text()
    assert "Count the number 1, 2, 3, 4, 5, 6" in out
    assert f"prefill by P0, decode by D0; {CPU_BLOCK * KV_BYTES_A_TOKEN:,} bytes of KV cache moved" in out
    assert up.left_behind() == NOTHING


def test_it_stays_until_stopped_and_its_curl_line_works(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path)
    ups.append(up)
    up.wait_for("Ctrl-C stops everything")
    line = re.search(r"curl .*?\}'", up.out.read_text(), re.DOTALL)
    assert line is not None
    answer = subprocess.run(shlex.split(line.group(0).replace("\\\n", " ")), capture_output=True, text=True, check=True)
    assert '"text":", 4, 5, 6' in answer.stdout
    up.process.send_signal(signal.SIGTERM)
    assert up.end() == 0
    assert up.left_behind() == NOTHING


def test_ctrl_c_while_loading_leaves_nothing(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path)
    ups.append(up)
    up.wait_for("loading weights")
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 130
    assert up.left_behind() == NOTHING


def test_an_engine_that_dies_while_loading_is_said_in_one_line(ups: list[Up], tmp_path: Path) -> None:
    up = Up(tmp_path)
    ups.append(up)
    up.wait_for("D0: loading weights")
    worker = next(each for each in up.family if "Worker" in "".join(each.cmdline()))
    worker.kill()
    assert up.end() == 1
    first, *rest = up.err.read_text().splitlines()
    assert re.match(r"baton: [PD]0 died while [a-zA-Z' ]+ \(exit code 1\): .+ \[log: ", first)
    assert all(line.startswith("  ") for line in rest)
    assert up.left_behind() == NOTHING


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-such-flag", "1"], r"exit code 2.*unrecognized arguments: --no-such-flag 1"),
        (["--max-model-len", "999999"], r"exit code 1.*max_model_len.*999999"),
    ],
)
def test_a_flag_that_vllm_refuses_ends_it_before_the_model_loads(
    ups: list[Up], tmp_path: Path, flags: list[str], said: str
) -> None:
    up = Up(tmp_path, MODEL, "--", *flags)
    ups.append(up)
    up.wait_for("importing vLLM")
    assert up.end() == 1
    assert re.search(said, up.err.read_text().splitlines()[0])
    assert "loading weights" not in up.out.read_text()
    assert up.left_behind() == NOTHING
