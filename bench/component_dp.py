#!/usr/bin/env python3
"""Component data parallelism against plain data parallelism: the same two replicas on the same cores, one run.

Each kind is a decode server that computes prompts too. All are up at once and take turns, so that a machine that
becomes slower does so for all: milliseconds a token by clients at once, and the bytes of weights that a rank said it
holds. The model is one of four small layers made on the spot, or any that is given. Measure on a machine that does
nothing else.

usage: python bench/component_dp.py [--model MODEL] [--shared attention,mlp] [--rounds 5] [--tokens 32]
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

COMPONENTS = ("attention", "embedding", "mlp", "lm_head")
CLIENTS = (1, 2, 8)
START_SECONDS = 600.0
ROOT = Path(__file__).parent.parent


class Engine:
    """A decode server of two replicas that share *shared*, healthy inside the block."""

    def __init__(self, model: str, shared: Sequence[str], folder: Path, port: int) -> None:
        self.name = "+".join(shared) or "nothing"
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{self.name}.log"
        own = json.dumps({"baton_config": {f"{component}_dp_size": 2 for component in shared}})
        self._argv = [sys.executable, "-m", "baton.cli", "engine", model, "--role", "decode", "--port", str(port)]
        self._argv += ["--side-channel-port", str(port + 2), "--host", "127.0.0.1", "--no-enable-prefix-caching"]
        self._argv += ["--served-model-name", "measured", "--data-parallel-size", "2", "--additional-config", own]
        self._argv += ["--max-num-seqs", "8", "--max-model-len", "1024"]

    def __enter__(self) -> Engine:
        since = time.monotonic()
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._argv, stdout=sink, stderr=subprocess.STDOUT, env=os.environ, start_new_session=True
            )
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() - since > START_SECONDS:
                raise SystemExit(f"{self._argv} did not start:\n{self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        print(f"{self.name} is healthy after {time.monotonic() - since:.0f} s", flush=True)
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

    def weight_bytes(self) -> str:
        found = re.search(r"Bytes of weights on rank 0: (.*)", self.log.read_text(errors="replace"))
        return f"{sum(map(int, re.findall(r'[0-9]+', found[1]))):,}" if found else ""

    def decode(self, clients: int, tokens: int) -> float:
        """Milliseconds a token, *clients* at once."""

        def seconds(seed: int, out: int) -> float:
            ids = [10 + (17 * place + 31 * seed) % 250 for place in range(20)]
            body = {"model": "measured", "prompt": ids, "max_tokens": out, "ignore_eos": True, "temperature": 0}
            headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(seed % 2)}
            since = time.perf_counter()
            request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
            urllib.request.urlopen(request, timeout=600).read()
            return time.perf_counter() - since

        with ThreadPoolExecutor(clients) as pool:
            short = list(pool.map(seconds, range(clients), [1] * clients))
            long = list(pool.map(seconds, range(clients), [1 + tokens] * clients))
        # What the prompts took is in both.
        return 1000 * (max(long) - max(short)) / tokens


def tiny(folder: Path) -> str:
    """A model of four small layers."""
    sys.path.insert(0, str(ROOT))
    from tests.e2e.tiny import llama

    return str(llama(folder / "tiny"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or name; one of four small layers unless given")
    parser.add_argument("--shared", default=",".join(COMPONENTS), help="components of the second kind, with , between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=18400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = args.model or tiny(folder)
        kinds: Sequence[Sequence[str]] = ((), args.shared.split(","))
        engines = [
            stack.enter_context(Engine(model, shared, folder, args.port + 10 * place))
            for place, shared in enumerate(kinds)
        ]
        made: dict[tuple[str, int], list[float]] = {}
        for turn in range(1 + args.rounds):
            for clients in CLIENTS:
                for engine in engines if turn % 2 else engines[::-1]:
                    spent = engine.decode(clients, args.tokens)
                    if turn:  # the first is for what is made at first use
                        made.setdefault((engine.name, clients), []).append(spent)
            print(f"round {turn} of {args.rounds}", flush=True)
        print(f"| shared | bytes of weights a rank | {' | '.join(f'{n} at once, ms a token' for n in CLIENTS)} |")
        print("| --- " * (len(CLIENTS) + 2) + "|")
        for engine in engines:
            cells = [f"{statistics.median(made[engine.name, clients]):.1f}" for clients in CLIENTS]
            print(f"| {engine.name} | {engine.weight_bytes()} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
