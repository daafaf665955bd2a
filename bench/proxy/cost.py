#!/usr/bin/env python3
"""What one request costs the proxy in CPU, without sockets, and what each feature adds to it.

The whole way of a request runs in one process: bytes go in where a client's socket would be, canned answers come
where the engines' would, bytes come out. What remains is the proxy's own work. CPU microseconds a request, the least
of several rounds, features in turn.

On a noisy machine time says little: with --instructions it counts instructions under valgrind's callgrind instead,
which takes some minutes and is the same every time.

usage: python bench/proxy/cost.py [--requests 3000] [--rounds 5] [--profile json|stream|220 KB] [--instructions]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop
from fake_engine import ANSWER, STREAM, FakeEngine
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from baton.cluster import Endpoint, Role
from baton.http.client import Pool
from baton.http.client_connection import ClientConnection
from baton.http.connection import Connection
from baton.http.outbox import Outbox
from baton.proxy import Proxy, ProxySettings, app
from baton.proxy.memory import settle_memory
from baton.proxy.tracing import Tracer

PREFILL = FakeEngine()
PREFILL.role = "prefill"


class Wire:
    """Stands where a transport would: what is written goes to *sink*."""

    def __init__(self, sink: Any) -> None:
        self._sink = sink

    def write(self, data: bytes) -> None:
        self._sink(data)

    def writelines(self, pieces: Any) -> None:
        self._sink(b"".join(pieces))

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def get_extra_info(self, name: str) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


async def connect(pool: Pool) -> ClientConnection:
    """In place of :meth:`Pool.connect`: a connection to an engine that answers in the loop's next turn."""
    loop = asyncio.get_running_loop()
    connection = ClientConnection(loop, Outbox(), lambda _: None)

    def answer(data: bytes) -> None:
        if pool.origin.port == 1:
            said = PREFILL.answer(data[:4].lower(), b"")
        else:
            said = STREAM if b'"stream": true' in data[-100:] else ANSWER
        loop.call_soon(connection.data_received, said)

    connection.connection_made(Wire(answer))  # type: ignore[arg-type]
    return connection


def request(kind: str) -> bytes:
    chars = 220_000 if kind == "220 KB" else 64
    body = json.dumps({"model": "m", "prompt": "x" * chars, "max_tokens": 16, "stream": kind == "stream"}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer key\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    )


async def spend(kind: str, count: int, **settings: Any) -> float:
    """CPU microseconds a request."""
    endpoints = (Endpoint(role=Role.PREFILL, host="h", port=1), Endpoint(role=Role.DECODE, host="h", port=2))
    proxy = Proxy(ProxySettings(host="", port=0, endpoints=endpoints, **settings))
    for instance in proxy.fleet:
        instance.usable = True
    server = proxy._server
    server._loop = asyncio.get_running_loop()
    done = asyncio.get_running_loop().create_future()
    data, left = request(kind), count

    def heard(said: bytes) -> None:
        nonlocal left
        if kind == "stream" and not said.endswith(b"0\r\n\r\n"):
            return
        left -= 1
        if left:
            server.loop.call_soon(connection.data_received, data)
        else:
            done.set_result(None)

    connection = Connection(server)
    connection.connection_made(Wire(heard))  # type: ignore[arg-type]
    started = time.process_time()
    connection.data_received(data)
    await done
    spent = time.process_time() - started
    await asyncio.sleep(0)
    return 1e6 * spent / count


def features(folder: str) -> dict[str, dict[str, Any]]:
    """Settings by the name of what they switch on."""
    return {
        "nothing more": {},
        "API keys (2)": {"api_keys": ("other", "key")},
        "access log": {"access_log": f"{folder}/access.log"},
        "CORS": {"cors_origins": ("https://a.example",)},
        "a gate with places free": {"max_requests": 1000},
        "a limit for each leg": {"request_timeout_seconds": 600.0},
        "keep-alive comments": {"keep_alive_seconds": 15.0},
        "all of these": {
            "api_keys": ("other", "key"),
            "access_log": f"{folder}/access.log",
            "cors_origins": ("https://a.example",),
            "max_requests": 1000,
            "request_timeout_seconds": 600.0,
            "keep_alive_seconds": 15.0,
        },
        "spans, without their way to a collector": {"otlp_endpoint": "nowhere"},
    }


def collected(feature: str, kind: str, requests: int) -> int:
    """Instructions of a whole run of this file, its start included."""
    argv = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, __file__)
    words = ("--only", feature, kind, "--requests", str(requests))
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    said = subprocess.run((*argv, *words), env=environ, capture_output=True, text=True, check=True).stderr
    return int(said.partition("Collected : ")[2].split()[0])


def counted() -> str:
    """A table of thousands of instructions a request: what a long run takes more than a short one."""
    short, long = 100, 500
    names, kinds = list(features("")), ("json", "stream")
    jobs = [(name, kind, size) for name in names for kind in kinds for size in (short, long)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(jobs, pool.map(lambda job: collected(*job), jobs), strict=True))
    lines = ["| thousand instructions a request | " + " | ".join(kinds) + " |", "| --- |" + " --- |" * len(kinds)]
    base: dict[str, float] = {}
    for name in names:
        row = {k: (found[name, k, long] - found[name, k, short]) / (long - short) / 1e3 for k in kinds}
        base = base or row
        cells = [f"{row[k]:.0f}" if row is base else f"{row[k] - base[k]:+.0f}" for k in kinds]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Nowhere(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", choices=["json", "stream", "220 KB"])
    parser.add_argument("--instructions", action="store_true", help="count instead of timing; needs valgrind")
    parser.add_argument("--only", nargs=2, metavar=("FEATURE", "KIND"), help="run requests of one kind and end")
    args = parser.parse_args()
    Pool.connect = connect  # type: ignore[method-assign]
    app.Tracer = lambda endpoint: Tracer(endpoint, Nowhere())  # type: ignore[assignment,misc]
    if args.only:
        with tempfile.TemporaryDirectory() as folder:
            settle_memory()
            uvloop.run(spend(args.only[1], args.requests, **features(folder)[args.only[0]]))
        return 0
    if args.instructions:
        print(counted())
        return 0
    if args.profile:
        profile = cProfile.Profile()
        profile.enable()
        uvloop.run(spend(args.profile, args.requests))
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)
        return 0
    kinds = ["json", "stream", "220 KB"]
    with tempfile.TemporaryDirectory() as folder:
        best: dict[str, dict[str, float]] = {}
        for _ in range(args.rounds):
            for name, settings in features(folder).items():
                for kind in kinds:
                    count = args.requests // (10 if kind == "220 KB" else 3 if "spans" in name else 1)
                    gc.collect()
                    spent = uvloop.run(spend(kind, count, **settings))
                    row = best.setdefault(name, {})
                    row[kind] = min(spent, row.get(kind, spent))
    base = best["nothing more"]
    print("| CPU us a request | " + " | ".join(kinds) + " |\n| --- |" + " --- |" * len(kinds))
    for name, row in best.items():
        cells = [f"{row[kind]:.0f}" if row is base else f"{row[kind] - base[kind]:+.1f}" for kind in kinds]
        print(f"| {name} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
