#!/usr/bin/env python3
"""Static shapes against stock vLLM, eager and compiled: the same engine flags, one kind after the other, one run.

Each kind is one engine that does both phases, asked by one client and by as many as it has rows for: seconds to
healthy, graphs, milliseconds a token of decode, milliseconds a prompt. `cold` starts with an empty store of graphs,
`warm` with the one that `cold` filled; `decode only` is what a decode server makes. Measure on a machine that does
nothing else.

usage: python bench/static_shapes.py [--kinds eager,cold,...] [--rounds 3] [--tokens 32] [--write]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m-instruct"
START_SECONDS = 1800.0
SEQS, BATCHED = 8, 512
PROMPTS = (20, 150, 500)
"""Tokens of the prompts whose prefill is measured."""

BOTH = json.dumps({"kv_role": "kv_both"})
FLAGS = ("--max-num-seqs", str(SEQS), "--max-num-batched-tokens", str(BATCHED), "--max-model-len", "1024")
STATIC = ("--static-shapes", "--kv-transfer-config", BOTH)
KINDS: Mapping[str, Sequence[str]] = {
    "eager": ("--kv-transfer-config", BOTH),
    "compiled": ("--kv-transfer-config", BOTH, "--compilation-config", "{}"),
    "static, padded only": (*STATIC, "--enforce-eager"),
    "static, cold": STATIC,
    "static, warm": STATIC,
    "static, warm, decode only": ("--static-shapes",),
}
PERFORMANCE = Path(__file__).parent.parent / "docs" / "performance.md"
MARKS = "<!-- from bench/static_shapes.py -->", "<!-- to here: static shapes -->"


class Engine:
    """One engine of Baton's own command, healthy inside the block."""

    def __init__(self, kind: str, folder: Path, port: int) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{kind}.log"
        argv = [sys.executable, "-m", "baton.cli", "engine", MODEL, "--role", "decode", "--port", str(port)]
        argv += ["--side-channel-port", str(port + 1), "--host", "127.0.0.1", "--no-enable-prefix-caching"]
        self._argv = [*argv, *FLAGS, *KINDS[kind]]
        # vLLM's own compiled code is cold as well.
        self._environ = {"BATON_GRAPH_CACHE": str(folder / "graphs"), "VLLM_CACHE_ROOT": str(folder / "vllm")}
        self._environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        self.seconds = 0.0

    def __enter__(self) -> Engine:
        since = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._argv,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environ,
                start_new_session=True,
            )
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() - since > START_SECONDS:
                raise SystemExit(f"{self._argv} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        self.seconds = time.monotonic() - since
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def graphs(self) -> str:
        found = re.search(r"ready with (\d+) graphs compiled and (\d+) loaded", self.log.read_text(errors="replace"))
        return f"{found[1]} compiled, {found[2]} loaded" if found else ""

    def seconds_of(self, prompt: int, tokens: int, seed: int) -> float:
        """Of one request with a prompt of its own, to the end of its answer."""
        ids = [100 + (17 * place + 31 * seed) % 5000 for place in range(prompt)]
        body = {"model": MODEL, "prompt": ids, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        data = json.dumps(body).encode()
        since = time.perf_counter()
        request = urllib.request.Request(f"{self.url}/v1/completions", data, {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=600).read()
        return time.perf_counter() - since


def measure(engine: Engine, rounds: int, tokens: int) -> dict[str, Any]:
    """Medians over *rounds*, in milliseconds."""
    engine.seconds_of(20, 4, 0)
    decode = {}
    for clients in (1, SEQS):
        spent = []
        for turn in range(rounds):
            with ThreadPoolExecutor(clients) as pool:
                short = list(pool.map(lambda seed: engine.seconds_of(20, 1, seed), range(clients)))
                long = list(pool.map(lambda seed: engine.seconds_of(20, 1 + tokens, seed), range(clients)))
            # What the prompts took is in both.
            spent.append(1000 * (max(long) - max(short)) / tokens)
            del turn
        decode[clients] = statistics.median(spent)
    prefill = {
        length: 1000 * statistics.median(engine.seconds_of(length, 1, seed) for seed in range(1 + rounds))
        for length in PROMPTS
    }
    return {"start": engine.seconds, "graphs": engine.graphs(), "decode": decode, "prefill": prefill}


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    heads = ["start, s", "graphs", *(f"decode, {n} at once, ms a token" for n in (1, SEQS))]
    heads += [f"prompt of {length}, ms" for length in PROMPTS]
    lines = [f"| | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for kind, one in found.items():
        cells = [f"{one['start']:.0f}", one["graphs"], *(f"{ms:.0f}" for ms in one["decode"].values())]
        lines.append(f"| {kind} | {' | '.join([*cells, *(f'{ms:.0f}' for ms in one['prefill'].values())])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=";".join(KINDS), help="some of them, with ; between")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--write", action="store_true", help=f"the table into {PERFORMANCE.name}")
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds.split(";"):
            with Engine(kind, Path(folder), args.port) as engine:
                found[kind] = measure(engine, args.rounds, args.tokens)
            print(kind, json.dumps(found[kind]), flush=True)
    print(table(found))
    if args.write:
        text = PERFORMANCE.read_text()
        first, last = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
        PERFORMANCE.write_text(f"{text[:first]}\n{table(found)}\n{text[last:]}")


if __name__ == "__main__":
    main()
