#!/usr/bin/env python3
"""How long `baton plan` takes for 64 hosts with 16 engines each: the whole command, and where its time goes.

Two files: one for Trainium with a model that is nowhere on this disk, one for CPU with a model that is, whose memory is
estimated and whose config is checked.

usage: python -m bench.plan [--hosts 64] [--engines 16] [--rounds 5] [--profile]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import io
import json
import pstats
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.timing import HEAD, row, timed

from baton.cli import main as baton
from baton.models import resolve

MODEL = "smollm2-135m-instruct"


def files(hosts: int, engines: int) -> dict[str, dict[str, Any]]:
    """The cluster files by name; half of each host's engines are prefill servers."""
    names = [f"h{index}" for index in range(hosts)]

    def file(model: str, device: str, each: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": model,
            "device": device,
            "hosts": {name: {"address": f"10.0.{index}.1", **each} for index, name in enumerate(names)},
            "defaults": defaults,
            "prefill": {"hosts": names, "replicas": engines // 2},
            "decode": {"hosts": names, "replicas": engines - engines // 2},
        }

    return {
        "neuron, TP 8, model elsewhere": file(
            "org/m", "neuron", {"devices": f"0-{8 * engines - 1}"}, {"tensor_parallel_size": 8}
        ),
        "cpu, model on this disk": file(MODEL, "cpu", {"cpus": "0-127"}, {}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=64)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="where the time goes, in place of the table")
    args = parser.parse_args()
    resolve(MODEL, report=lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for number, (name, value) in enumerate(files(args.hosts, args.engines).items()):
            paths[name] = Path(folder) / f"{number}.json"
            paths[name].write_text(json.dumps(value))
        if args.profile:
            for name, path in paths.items():
                print(f"\n{name}")
                profile(["plan", "-f", str(path), "--json"])
            return 0
        print(f"{args.hosts} hosts with {args.engines} engines each\n\nseconds\n\n{HEAD}")
        print(row("Python and imports", timed(command("-c", "import baton.cli.plan"), args.rounds)))
        for name, path in paths.items():
            file = ("-m", "baton.cli", "plan", "-f", str(path))
            print(row(f"{name}: `baton plan -f FILE`", timed(command(*file), args.rounds)))
            print(row(f"{name}: `--json`", timed(command(*file, "--json"), args.rounds)))
            output = ("--output", str(Path(folder) / "scripts"))
            print(row(f"{name}: `--output DIR`", timed(command(*file, *output), args.rounds)))
            print(row(f"{name}: `--host h7 --shell`", timed(command(*file, "--host", "h7", "--shell"), args.rounds)))
    return 0


def command(*words: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)


def profile(words: list[str]) -> None:
    profiler = cProfile.Profile()
    with contextlib.redirect_stdout(io.StringIO()):
        profiler.runcall(baton, words)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    sys.exit(main())
