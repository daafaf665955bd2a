#!/usr/bin/env python3
"""The proxy compiled and in Python: CPU time of its process a request, at the same load, in turn, several rounds.

Engines are fake ones that answer at once, every feature but spans is on (as in run.py). CPU time is what the kernel
counts for the process, user and system; requests are what the proxy itself counts. Medians.

usage: python bench/proxy/forms.py [--rounds 5] [--seconds 2] [--clients 32] [--against SRC]

With --against, a folder that holds another version's package, that one is a third form.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from run import HERE, free_ports, load, ours, running

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """What a process has used so far, in user and system."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / TICK


def requests(port: int) -> int:
    """What a proxy has answered so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        lines = response.read().decode().splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("baton_requests_total{")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--against", type=Path, metavar="SRC")
    args = parser.parse_args()
    forms: dict[str, Sequence[str]] = {"Python": ("env", "BATON_COMPILED=0"), "compiled": ("env",)}
    if args.against is not None:
        forms["the other"] = ("env", "BATON_COMPILED=0", f"PYTHONPATH={args.against}")
    cases = {
        f"json, {args.clients} clients": ("json", args.clients, 64),
        f"stream, {args.clients} clients": ("stream", args.clients, 64),
        "json, 1 client": ("json", 1, 64),
        "json, 20 clients, 220 KB": ("json", 20, 220_000),
    }
    ports = free_ports(["prefill", "decode", *forms])
    prefill, decode = str(ports["prefill"]), str(ports["decode"])
    spent: dict[str, dict[str, list[float]]] = {case: {form: [] for form in forms} for case in cases}
    rate: dict[str, dict[str, list[float]]] = {case: {form: [] for form in forms} for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        commands: dict[str, Sequence[str]] = {
            role: (sys.executable, str(HERE / "fake_engine.py"), role, port)
            for role, port in (("prefill", prefill), ("decode", decode))
        }
        for form, environ in forms.items():
            commands[form] = (*environ, *ours(ports[form], prefill, decode, folder))
        with running(commands, ports) as pids:
            for _ in range(args.rounds):
                for case, words in cases.items():
                    for form in forms:
                        used, answered = cpu_seconds(pids[form]), requests(ports[form])
                        said = load(ports[form], words, args.seconds)
                        answered = requests(ports[form]) - answered
                        spent[case][form].append(1e6 * (cpu_seconds(pids[form]) - used) / answered)
                        rate[case][form].append(said["requests_per_s"])
    names = list(forms)
    print("| CPU us a request (requests a second) | " + " | ".join(names) + " | compiled to Python |")
    print("| --- |" + " --- |" * (len(names) + 1))
    for case in cases:
        cpu = {form: statistics.median(spent[case][form]) for form in forms}
        cells = [f"{cpu[form]:.0f} ({statistics.median(rate[case][form]):,.0f})" for form in forms]
        print(f"| {case} | " + " | ".join(cells) + f" | {cpu['compiled'] / cpu['Python']:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
