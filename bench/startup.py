#!/usr/bin/env python3
"""What a start costs and what an idle cluster costs: Baton's 1P1D against the same engines with its plugin asleep.

Both run in turn in one run, the same commands on the same cores. Asleep means stock vLLM: spawned
processes, a spinning NIXL thread. Measure on a machine that does nothing else.

usage: python bench/startup.py [--rounds 3] [--idle-seconds 20] [--drop-caches] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from baton.launch import Command, PlanRequest, Supervisor, estimates, installed_engine, plan
from baton.launch.cluster_run import cluster_commands, probe_of
from baton.launch.devices import available_cpus
from baton.launch.leftovers import session_members
from baton.models import resolve

MODEL = "smollm2-135m-instruct"
START_SECONDS = 900.0
KINDS = {"baton": "1", "plugin asleep": "0"}


async def measure(kind: str, idle_seconds: float) -> dict[str, Any]:
    """One start: seconds to ready by process, the engine's phases, then what idling costs."""
    cluster = plan(PlanRequest(model=MODEL, cpus=available_cpus()))
    commands = {
        name: switched(command, KINDS[kind])
        for name, command in cluster_commands(cluster, resolve(MODEL), installed_engine()).items()
    }
    planned = estimates({each.id: commands[each.id] for each in cluster.instances})
    with tempfile.TemporaryDirectory() as logs:
        async with Supervisor(Path(logs)) as supervisor:
            started = time.monotonic()
            for name, command in commands.items():
                await supervisor.start(name, command, probe_of(cluster, name))
            await supervisor.until_ready(START_SECONDS)
            ready = time.monotonic() - started
            children = {child.name: child for child in supervisor.children}
            await asyncio.sleep(5)  # what a start leaves to do
            before = {name: cpu_seconds(child.process.pid) for name, child in children.items()}
            await asyncio.sleep(idle_seconds)
            return {
                "ready": ready,
                "phases": {name: child.phases for name, child in children.items()},
                "idle_percent": {
                    name: 100 * (cpu_seconds(child.process.pid) - before[name]) / idle_seconds
                    for name, child in children.items()
                },
                "memory_mb": {name: memory_bytes(child.process.pid) / 1e6 for name, child in children.items()},
                "planned_mb": {name: each.total / 1e6 for name, each in planned.items()},
            }


def switched(command: Command, active: str) -> Command:
    environ: Mapping[str, str] = command.environ
    return dataclasses.replace(command, environ={**environ, "BATON_ENGINE": active}) if environ else command


def cpu_seconds(session: int) -> float:
    """User and system seconds of every process of a session so far."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in session_members(session))


def memory_bytes(session: int) -> int:
    """Proportional set size: pages shared among the processes count once."""
    return sum(psutil.Process(pid).memory_full_info().pss for pid in session_members(session))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--drop-caches", action="store_true", help="empty the page cache before each start (root)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        for kind, found in results.items():
            if args.drop_caches:
                subprocess.run(["sync"], check=True)
                Path("/proc/sys/vm/drop_caches").write_text("3")
            found.append(asyncio.run(measure(kind, args.idle_seconds)))
            print(f"round {number + 1} of {args.rounds}, {kind}: ready after {found[-1]['ready']:.1f} s", flush=True)
    report(results)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    return 0


def report(results: Mapping[str, list[dict[str, Any]]]) -> None:
    print("\n| median | " + " | ".join(results) + " |\n| --- |" + " --- |" * len(results))
    rows = {"start to ready, s": lambda run: run["ready"]}
    for name in ("P0", "D0", "proxy"):
        rows[f"{name} idle, % of a core"] = lambda run, name=name: run["idle_percent"][name]
        rows[f"{name} memory, MB (PSS)"] = lambda run, name=name: run["memory_mb"][name]
        if name != "proxy":
            rows[f"{name} memory as planned, MB"] = lambda run, name=name: run["planned_mb"][name]
    for row, pick in rows.items():
        print(
            f"| {row} | "
            + " | ".join(f"{statistics.median(map(pick, found)):.1f}" for found in results.values())
            + " |"
        )
    print("\nD0's phases in the last round, seconds from its start:")
    for phase, at in results["baton"][-1]["phases"]["D0"]:
        print(f"{at:6.1f}  {phase}")


if __name__ == "__main__":
    sys.exit(main())
