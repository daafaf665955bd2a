#!/usr/bin/env python3
"""Many streams open at once through the proxy: errors, latency of /health meanwhile, memory, descriptors afterwards.

usage: python bench/proxy/streams.py [--streams 2000] [--rate 20] [--tokens 400]
"""

from __future__ import annotations

import argparse
import asyncio
import resource
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


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    raw = await reader.read()
    writer.close()
    return raw


async def stream(port: int, tokens: int) -> bool:
    """Whether one stream came whole."""
    try:
        raw = await exchange(port, REQUEST)
    except OSError:
        return False
    return raw.startswith(b"HTTP/1.1 200") and raw.count(b"data: {") == tokens and raw.count(b"data: [DONE]") == 1


async def watch_health(port: int, latencies: list[float]) -> None:
    while True:
        started = time.perf_counter()
        raw = await exchange(port, HEALTH)
        latencies.append(time.perf_counter() - started)
        assert raw.startswith(b"HTTP/1.1 200"), raw
        await asyncio.sleep(0.05)


async def measure(port: int, proxy: psutil.Process, streams: int, tokens: int) -> None:
    await exchange(port, HEALTH)
    before, latencies = proxy.num_fds(), []
    watching = asyncio.create_task(watch_health(port, latencies))
    started = time.perf_counter()
    whole = await asyncio.gather(*(stream(port, tokens) for _ in range(streams)))
    spent = time.perf_counter() - started
    watching.cancel()
    memory = proxy.memory_info().rss
    await asyncio.sleep(8)  # connections to engines are kept for 4 s
    latencies.sort()
    print(f"{streams} streams of {tokens} tokens, {spent:.1f} s: {sum(whole)} whole, {streams - sum(whole)} not")
    median, tail = (1e3 * latencies[int(len(latencies) * part)] for part in (0.5, 0.99))
    print(f"/health p50 {median:.1f} ms, p99 {tail:.1f} ms over {len(latencies)} questions")
    print(
        f"proxy: {memory / 1e6:.0f} MB at the end of the streams; descriptors {before} before, {proxy.num_fds()} after"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=2000)
    parser.add_argument("--rate", type=float, default=20.0, help="tokens a second of each stream")
    parser.add_argument("--tokens", type=int, default=400, help="tokens of each stream")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    ports = free_ports(["prefill", "decode", "proxy"])
    prefill, decode, proxy = (str(ports[name]) for name in ("prefill", "decode", "proxy"))
    engine = (sys.executable, str(HERE / "fake_engine.py"))
    words = ("--port", proxy, "--prefiller-ports", prefill, "--decoder-ports", decode, "--log-level", "error")
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
