#!/usr/bin/env python3
"""Many streams open at once through the proxy: errors, latency of /health meanwhile, memory, descriptors afterwards.

/health is asked by a process of its own, as a load balancer's probe is: the one that reads the streams would add the
delay of its own loop.

usage: python bench/proxy/streams.py [--streams 2000] [--rate 20] [--tokens 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import select
import socket
import subprocess
import sys
import time

import psutil
import uvloop
from run import HERE, free_ports, running

BODY = b'{"model": "m", "prompt": "x", "max_tokens": 16, "stream": true}'
REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


class Stream(asyncio.Protocol):
    """Sends the request and reads to the end."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(REQUEST)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.pieces.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


async def stream(port: int, tokens: int) -> bool:
    """Whether one stream came whole."""
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(Stream, "127.0.0.1", port)
    except OSError:
        return False
    await protocol.closed
    raw = b"".join(protocol.pieces)
    return raw.startswith(b"HTTP/1.1 200") and raw.count(b"data: {") == tokens and raw.count(b"data: [DONE]") == 1


def watch_health(port: int) -> None:
    """Ask twenty times a second until standard input ends; print the seconds that each answer took, in JSON."""
    latencies: list[float] = []
    parent = sys.stdin.fileno()
    while not select.select([parent], [], [], 0.05)[0]:
        started = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
            client.sendall(HEALTH)
            raw = b"".join(iter(lambda: client.recv(65536), b""))
        latencies.append(time.perf_counter() - started)
        assert raw.startswith(b"HTTP/1.1 200"), raw
    print(json.dumps(latencies))


async def measure(port: int, proxy: psutil.Process, streams: int, tokens: int) -> None:
    before, used = proxy.num_fds(), sum(proxy.cpu_times()[:2])
    watching = subprocess.Popen(
        (sys.executable, __file__, "--health", str(port)), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    started = time.perf_counter()
    whole = await asyncio.gather(*(stream(port, tokens) for _ in range(streams)))
    spent, used = time.perf_counter() - started, sum(proxy.cpu_times()[:2]) - used
    latencies = sorted(json.loads(watching.communicate()[0]))
    memory = proxy.memory_info().rss
    await asyncio.sleep(8)  # connections to engines are kept for 4 s
    print(f"{streams} streams of {tokens} tokens, {spent:.1f} s: {sum(whole)} whole, {streams - sum(whole)} not")
    median, tail = (1e3 * latencies[int(len(latencies) * part)] for part in (0.5, 0.99))
    print(f"/health p50 {median:.1f} ms, p99 {tail:.1f} ms over {len(latencies)} questions")
    print(f"proxy: {used:.1f} s of CPU, {1e6 * used / (streams * (tokens + 1)):.1f} us an event")
    print(
        f"proxy: {memory / 1e6:.0f} MB at the end of the streams; descriptors {before} before, {proxy.num_fds()} after"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    parser.add_argument("--health", type=int, metavar="PORT", help="only ask for /health, until standard input ends")
    args = parser.parse_args()
    if args.health:
        watch_health(args.health)
        return 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ports = free_ports(["prefill", "decode", "proxy"])
    prefill, decode, proxy = (str(ports[name]) for name in ("prefill", "decode", "proxy"))
    engine = (sys.executable, str(HERE / "fake_engine.py"))
    words = (
        "--port",
        proxy,
        "--prefiller-ports",
        prefill,
        "--decoder-ports",
        decode,
        "--log-level",
        "error",
        "--no-warm-up",
    )
    commands = {
        "prefill": (*engine, "prefill", prefill),
        "decode": (*engine, "decode", decode, str(args.rate), str(args.tokens)),
        "proxy": (sys.executable, "-m", "baton.cli", "proxy", *words),
    }
    with running(commands, ports) as pids:
        watched = psutil.Process(pids["proxy"])
        uvloop.run(measure(ports["proxy"], watched, args.streams, args.tokens))
    return 0


if __name__ == "__main__":
    sys.exit(main())
