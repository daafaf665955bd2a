#!/usr/bin/env python3
"""The proxy against its rivals: same fake engines, same load, one run, taking turns, several rounds, medians.

Rivals: vllm-router (Rust, from its package), a proxy on aiohttp, one on FastAPI and httpx; and the decode engine
directly, as what the load could get at most. They live in a venv of their own. Everything runs on this
machine's cores at once, so compare only within a run, and run nothing else.

usage: python bench/proxy/run.py [--rounds 3] [--seconds 3] [--quick] [--json FILE] [--write]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VENV = ROOT / ".venv-bench"
PACKAGES = (
    "vllm-router==0.1.17",
    "aiohttp==3.14.5",
    "fastapi==0.136.3",
    "uvicorn==0.54.0",
    "httpx==0.28.1",
    "uvloop==0.23.0",
    "httptools==0.9.0",
    "matplotlib==3.10.7",
)
PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "proxy.svg"
FROM, TO = "<!-- from bench/proxy/run.py -->", "<!-- to here -->"
OURS = "baton"
ONE = "baton, one process"
ROUTER = "vllm-router"
START_SECONDS = 60.0

# kind, clients, prompt characters
CASES = [(kind, clients, 64) for kind in ("json", "stream") for clients in (1, 32, 128, 512)] + [
    ("json", 20, 220_000),
    ("stream", 20, 220_000),
]
QUICK = [(kind, clients, 64) for kind in ("json", "stream") for clients in (1, 32)] + [("json", 20, 220_000)]


def rivals_python() -> str:
    """The interpreter of the rivals' venv, made when missing."""
    python = VENV / "bin" / "python"
    stamp = VENV / ".installed"
    wanted = "\n".join(PACKAGES)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making {VENV.name} with {', '.join(PACKAGES)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        stamp.write_text(wanted)
    return str(python)


def ours(port: int, prefill: str, decode: str, folder: str) -> tuple[str, ...]:
    """Baton's proxy with all its features but spans."""
    return (
        *(sys.executable, "-m", "baton.cli", "proxy", "--port", str(port), "--log-level", "error"),
        *("--prefiller-ports", prefill, "--decoder-ports", decode),
        *("--api-key", "other", "--api-key", "key", "--access-log", f"{folder}/{port}.log"),
        *("--cors-allowed-origins", "https://a.example", "--max-concurrent-requests", "10000"),
        # The engines are fake: there is nothing to be proven.
        *("--request-timeout-secs", "1800", "--sse-keepalive-secs", "15", "--no-warm-up"),
    )


def commands(ports: dict[str, int], folder: str) -> dict[str, Sequence[str]]:
    """Everything that runs, by name."""
    python, prefill, decode = rivals_python(), str(ports["prefill"]), str(ports["decode"])
    return {
        "prefill": (sys.executable, str(HERE / "fake_engine.py"), "prefill", prefill),
        "decode": (sys.executable, str(HERE / "fake_engine.py"), "decode", decode),
        # with everything on that a front door has; the router takes every core by itself, Baton when told to
        OURS: (*ours(ports[OURS], prefill, decode, folder), "--workers", "2"),
        ONE: ours(ports[ONE], prefill, decode, folder),
        # at its best: round robin, log level error, its own defaults else
        ROUTER: (
            str(VENV / "bin" / "vllm-router"),
            "--host",
            "127.0.0.1",
            "--port",
            str(ports[ROUTER]),
            "--vllm-pd-disaggregation",
            "--prefill",
            f"http://127.0.0.1:{prefill}",
            "--decode",
            f"http://127.0.0.1:{decode}",
            "--policy",
            "round_robin",
            "--log-level",
            "error",
            "--prometheus-port",
            str(ports["router metrics"]),
        ),
        "aiohttp": (python, str(HERE / "rivals" / "aiohttp_proxy.py"), str(ports["aiohttp"]), prefill, decode),
        "fastapi+httpx": (
            python,
            str(HERE / "rivals" / "fastapi_proxy.py"),
            str(ports["fastapi+httpx"]),
            prefill,
            decode,
        ),
    }


@contextmanager
def running(commands: Mapping[str, Sequence[str]], ports: dict[str, int]) -> Iterator[dict[str, int]]:
    """All of them, up, by name: their pids; stopped by pid in the end."""
    processes = {
        name: subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for name, argv in commands.items()
    }
    try:
        for name, process in processes.items():
            wait(name, process, ports[name])
        yield {name: process.pid for name, process in processes.items()}
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(30)


def wait(name: str, process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"{name} ended with {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise SystemExit(f"{name} does not answer on port {port}")


def free_ports(names: Sequence[str]) -> dict[str, int]:
    sockets = {name: socket.create_server(("127.0.0.1", 0)) for name in names}
    ports = {name: each.getsockname()[1] for name, each in sockets.items()}
    for each in sockets.values():
        each.close()
    return ports


def load(port: int, case: tuple[str, int, int], seconds: float) -> dict[str, Any]:
    kind, clients, chars = case
    argv = (sys.executable, str(HERE / "load.py"), str(port), str(clients), str(seconds), kind, str(chars))
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    """Medians of requests a second and of the first byte; ratios are ours to the Rust router's."""
    names = list(next(iter(results.values())))
    lines = [
        "| case | " + " | ".join(names) + " | ratio | first byte p50, ms: baton, router, ratio |",
        "| --- |" + " --- |" * (len(names) + 2),
    ]
    for case, by_name in results.items():
        rate = {name: statistics.median(each["requests_per_s"] for each in runs) for name, runs in by_name.items()}
        first = {name: statistics.median(each["first_byte_ms_p50"] for each in runs) for name, runs in by_name.items()}
        errors = {name: sum(each["errors"] for each in runs) for name, runs in by_name.items()}
        cells = [f"{rate[name]:,.0f}" + (f" ({errors[name]} errors)" if errors[name] else "") for name in names]
        lines.append(
            f"| {case} | " + " | ".join(cells) + f" | {rate[OURS] / rate[ROUTER]:.2f} | "
            f"{first[OURS]:.2f}, {first[ROUTER]:.2f}, {first[OURS] / first[ROUTER]:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put every single result")
    parser.add_argument("--write", action="store_true", help=f"put table and plot into docs/{PAGE.name}")
    args = parser.parse_args()
    cases = QUICK if args.quick else CASES
    names = ["direct", OURS, ONE, ROUTER, "aiohttp", "fastapi+httpx"]
    ports = free_ports(["prefill", *names[1:], "router metrics", "decode"])
    ports["direct"] = ports["decode"]
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder, running(commands(ports, folder), ports):
        for number in range(args.rounds):
            for case in cases:
                label = f"{case[0]}, {case[1]} clients" + (", 220 KB" if case[2] > 1000 else "")
                by_name = results.setdefault(label, {name: [] for name in names})
                for name in names:
                    by_name[name].append(load(ports[name], case, args.seconds))
            print(f"round {number + 1} of {args.rounds} done", flush=True)
    print("\n" + table(results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.write:
        write(results, f"python bench/proxy/run.py --rounds {args.rounds} --seconds {args.seconds:g}")
    return 0


def write(results: dict[str, dict[str, list[dict[str, Any]]]], command: str) -> None:
    """Table and plot into the docs, with the commit that was measured."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    head, _, rest = PAGE.read_text().partition(FROM)
    _, _, tail = rest.partition(TO)
    said = f"`{command}` at commit {commit.stdout.strip()}:"
    PAGE.write_text(f"{head}{FROM}\n{said}\n\n{table(results)}\n\n![requests a second]({PICTURE.name})\n{TO}{tail}")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(results, file)
        file.flush()
        subprocess.run((rivals_python(), str(HERE / "plot.py"), file.name, str(PICTURE)), check=True)


if __name__ == "__main__":
    sys.exit(main())
