#!/usr/bin/env python3
"""Many requests through the proxy, one after another: its memory and its descriptors must not grow.

usage: python bench/proxy/soak.py [--requests 100000] [--clients 32]
"""

from __future__ import annotations

import argparse
import sys

import psutil
from run import HERE, free_ports, load, running

STEP_SECONDS = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=32)
    args = parser.parse_args()
    ports = free_ports(["prefill", "decode", "proxy"])
    prefill, decode, proxy = (str(ports[name]) for name in ("prefill", "decode", "proxy"))
    engine = (sys.executable, str(HERE / "fake_engine.py"))
    words = ("--port", proxy, "--prefiller-ports", prefill, "--decoder-ports", decode, "--log-level", "error")
    commands = {
        "prefill": (*engine, "prefill", prefill),
        "decode": (*engine, "decode", decode),
        "proxy": (sys.executable, "-m", "baton.cli", "proxy", *words),
    }
    with running(commands, ports) as pids:
        watched = psutil.Process(pids["proxy"])
        done, errors = 0, 0
        print("| requests | memory, MB | descriptors | errors |\n| --- | --- | --- | --- |")
        while done < args.requests:
            for kind, chars in (("json", 64), ("stream", 64), ("json", 220_000)):
                result = load(ports["proxy"], (kind, args.clients, chars), STEP_SECONDS)
                done += int(result["requests_per_s"] * STEP_SECONDS)
                errors += result["errors"]
            memory = watched.memory_info().rss / 1e6
            print(f"| {done:,} | {memory:.1f} | {watched.num_fds()} | {errors} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
