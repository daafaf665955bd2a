"""`baton up` as a person uses it: what it shows, how it fails, and that it leaves nothing behind."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.engines import BATON, KV_BYTES_A_TOKEN, START_SECONDS, status
from tests.ports import free_ports

CPU_BLOCK = 128
"""vLLM's own block size on CPU, in tokens."""


class Up:
    """One `baton up` in a scratch folder of its own, so that whatever it leaves there is seen."""

    def __init__(self, tmp_path: Path, *words: str) -> None:
        proxy, prefill, decode, p_side, d_side = free_ports(5)
        self.port = proxy
        self.ports = [proxy, prefill, decode, p_side, d_side]
        self.scratch = Path(tempfile.mkdtemp(prefix="up-", dir="/tmp"))  # short: it holds sockets
        self.shared_before = set(Path("/dev/shm").iterdir())
        self.out = tmp_path / "out"
        self.err = tmp_path / "err"
        self.logs = tmp_path / "logs"
        at = words.index("--") if "--" in words else len(words)
        argv = [
            *BATON,
            "up",
            *words[:at],
            "--port",
            str(proxy),
            "--prefill-port",
            str(prefill),
            "--decode-port",
            str(decode),
            "--prefill-side-channel-port",
            str(p_side),
            "--decode-side-channel-port",
            str(d_side),
            "--log-dir",
            str(self.logs),
            *words[at:],
        ]
        self.environ = {**os.environ, "TMPDIR": str(self.scratch), "XDG_STATE_HOME": str(tmp_path / "state")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.environ)
        self.family: set[psutil.Process] = set()

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while text not in self.out.read_text():
            assert self.process.poll() is None, f"it ended: {self.out.read_text()} {self.err.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} in {self.out.read_text()}"
            self.remember()
            time.sleep(0.05)
        self.remember()

    def remember(self) -> None:
        """Note every process under it, to ask after each one in the end."""
        if psutil.pid_exists(self.process.pid):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            logs = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(self.logs.iterdir())]
            said = "\n".join([self.out.read_text(), self.err.read_text(), *logs])
            raise AssertionError(f"it runs on after {START_SECONDS} s:\n{said}") from None

    def left_behind(self) -> dict[str, object]:
        """What still stands of it; everything empty when it cleaned up."""
        alive = [each.pid for each in self.family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        return {
            "processes": alive,
            "shared memory": sorted(set(Path("/dev/shm").iterdir()) - self.shared_before),
            "scratch": sorted(path.name for path in self.scratch.iterdir()),
            "listeners": [port for port in self.ports if status(f"http://127.0.0.1:{port}/") is not None],
        }


NOTHING: dict[str, object] = {"processes": [], "shared memory": [], "scratch": [], "listeners": []}


@pytest.fixture
def ups(tmp_path: Path) -> Iterator[list[Up]]:
    """Whatever a test starts is killed when the test fails."""
    made: list[Up] = []
    yield made
    for up in made:
        for process in up.family:
            if process.is_running():
                process.kill()
        if up.process.poll() is None:
            up.process.kill()
            up.process.wait()
        shutil.rmtree(up.scratch, ignore_errors=True)


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
