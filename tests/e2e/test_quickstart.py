"""The quickstart as it is written: its blocks, in their order, on real engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton.launch.leftovers import session_alive, shared_memory_of
from baton.models import cache_root
from tests.docs.pages import ROOT, Block, blocks_of
from tests.e2e.engines import START_SECONDS, status
from tests.ports import free_ports

PAGE = ROOT / "docs" / "quickstart.md"
PORTS = (8000, 8100, 8200, 5559, 5659)
"""Those that the page uses; here they may be somebody else's."""


class Reader:
    """Somebody who types the page's blocks into terminals, in a home of their own, with other ports and cores."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
        self.terminals: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.segments: set[Path] = set()
        (home / "bin").mkdir()
        program = home / "bin" / "baton"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m baton.cli "$@"\n')
        program.chmod(0o755)
        self.environ = {
            **os.environ,
            "HOME": str(home),
            "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
            # The model is unpacked already.
            "BATON_CACHE": str(cache_root()),
        }

    def typed(self, block: Block) -> str:
        """A block's text, as it is typed here."""
        cores = sorted(os.sched_getaffinity(0))
        text = block.text
        for theirs, ours in self.ports.items():
            text = re.sub(rf"\b{theirs}\b", str(ours), text)
        return re.sub(r"--cpus ([01])\b", lambda found: f"--cpus {cores[0] if found[1] == '0' else cores[-1]}", text)

    def start(self, block: Block) -> Path:
        """Run a block that stays, in a terminal of its own; what it writes."""
        out = self.home / f"terminal-{len(self.terminals)}"
        with out.open("wb") as sink:
            process = subprocess.Popen(
                ["bash", "-c", self.typed(block)],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.environ,
                cwd=self.home,
            )
        self.terminals.append((process, out))
        return out

    def run(self, block: Block) -> str:
        """Run a block that ends; what it writes."""
        argv = ["bash", "-c", f"set -o pipefail\n{self.typed(block)}"]
        done = subprocess.run(
            argv, capture_output=True, text=True, check=False, env=self.environ, cwd=self.home, timeout=300
        )
        assert done.returncode == 0, f"{block}: {done.stdout} {done.stderr}"
        return done.stdout

    def until(self, what: str, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not there():
            for process, out in self.terminals:
                assert process.poll() is None, out.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, f"no {what} after {START_SECONDS} s"
            time.sleep(0.2)

    def leave(self) -> None:
        """Ctrl-C in each terminal, the last one first."""
        self.segments = {segment for process, _ in self.terminals for segment in shared_memory_of(process.pid)}
        for process, out in reversed(self.terminals):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(START_SECONDS)
            # What it forked may end a moment later.
            deadline = time.monotonic() + START_SECONDS
            while session_alive(process.pid):
                assert time.monotonic() < deadline, out.read_text(errors="replace")[-3000:]
                time.sleep(0.05)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    made = Reader(tmp_path)
    yield made
    segments = {segment for process, _ in made.terminals for segment in shared_memory_of(process.pid)} | made.segments
    for process, _ in made.terminals:
        if session_alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    for segment in segments:
        segment.unlink(missing_ok=True)


def steps() -> dict[str, list[Block]]:
    """The blocks under each heading that begins with a number, by that number."""
    text = PAGE.read_text().splitlines()
    made: dict[str, list[Block]] = {}
    for block in blocks_of(PAGE):
        above = next(line for line in reversed(text[: block.line]) if line.startswith("#"))
        found = re.match(r"## (\d)\. ", above)
        if found:
            made.setdefault(found[1], []).append(block)
    return made


def test_the_quickstart_works_as_it_is_written(reader: Reader) -> None:
    blocks = steps()
    assert list(blocks) == ["1", "2", "3", "4"]
    (prefill,), (decode,), (proxy, health), (request, counters) = blocks.values()
    up = "Application startup complete"
    assert up in PAGE.read_text()
    outs = [reader.start(prefill), reader.start(decode)]
    reader.start(proxy)
    for out in outs:
        reader.until(f"{up!r} in {out}", lambda out=out: up in out.read_text(errors="replace"))  # type: ignore[misc]
    reader.until("good health", lambda: '"status":"ok"' in reader.run(health))
    said = json.loads(reader.run(health))
    assert (said["prefill"]["usable"], said["decode"]["usable"], said["warm_up"]["proven"]) == (1, 1, 1)
    answer = json.loads(reader.run(request))
    assert answer["choices"][0]["text"].startswith(", 4, 5, 6, 7")
    assert answer["usage"]["completion_tokens"] == 200
    counted = {line.split("{")[0]: float(line.split()[-1]) for line in reader.run(counters).splitlines() if "{" in line}
    assert counted["vllm:nixl_bytes_transferred_sum"] > 0
    assert counted["vllm:external_prefix_cache_hits_total"] > 0
    reader.leave()
    assert [status(f"http://127.0.0.1:{port}/health") for port in reader.ports.values()] == [None] * len(PORTS)
