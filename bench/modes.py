"""Time to the first token in read mode and in write mode, on real engines, both in one run.

A pair of engines in each mode, prefill servers on the first core and decode servers on the last; one client, random
prompts, the modes in turn, medians. `bench/write_mode.py` shows the same with fake engines whose times are known.

    python -m bench.modes [--rounds 7] [--logs DIR]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.e2e import tiny
from tests.e2e.topology import MODEL, Engine, cluster

from baton.models import EMBEDDED, ensure

LENGTHS = (30, 250, 800)
"""Of the prompts, in tokens."""

MODES = ("read", "write")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="requests of each length in each mode")
    parser.add_argument(
        "--tiny", action="store_true", help="a model of four tiny layers, so that the hand-off is most of it"
    )
    parser.add_argument("--logs", metavar="DIR", help="where logs stay (default: they go)")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="modes-") as folder, ExitStack() as stack:
        logs = Path(args.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = tiny.llama(Path(folder) / "model") if args.tiny else ensure(EMBEDDED["smollm2-135m-instruct"])
        ports = {}
        for mode in MODES:
            more = ("--transfer-mode", mode, "--max-model-len", "1024", "--kv-cache-memory-bytes", str(1 << 28))
            prefill, decode = (Engine((*more, "--cpus", str(core))) for core in (cores[0], cores[-1]))
            made = stack.enter_context(cluster(mode, model, logs, prefill=(prefill,), decode=(decode,)))
            ports[mode] = made.proxy.port
        print("| prompt | read | write | write / read |\n| --- | --- | --- | --- |")
        chance = random.Random(1)
        for length in LENGTHS:
            times: dict[str, list[float]] = {mode: [] for mode in MODES}
            for _ in range(args.rounds):
                for mode in MODES:
                    prompt = [chance.randrange(5, 250 if args.tiny else 40_000) for _ in range(length)]
                    times[mode].append(first_token(ports[mode], prompt))
            read, write = (statistics.median(times[mode]) for mode in MODES)
            print(f"| {length} tokens | {read * 1e3:.0f} ms | {write * 1e3:.0f} ms | {write / read:.2f} |", flush=True)


def first_token(port: int, prompt: Sequence[int]) -> float:
    """Seconds from the request to the first event of its stream, which is read to its end."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps({**body, "stream": True}), {"content-type": "application/json"}
    )
    response = connection.getresponse()
    line = response.readline()
    took = time.perf_counter() - started
    if response.status != 200 or not line.startswith(b"data: {"):
        raise SystemExit(f"the proxy answered {response.status}: {line!r}")
    response.read()
    connection.close()
    return took


if __name__ == "__main__":
    main()
