#!/usr/bin/env python3
"""The time to the first token in write mode against read mode, through the real proxy, with fake engines that sleep.

A prefill server takes --prefill-ms for each prompt. A decode server takes --setup-ms before it can take a KV cache
(its queue, its admission), then --transfer-ms until it has it. In read mode these follow each other; in write mode the
set-up goes on beside prefill. Both fleets and both proxies run at once and are asked in turn. What real engines do
besides (write mode's decode server waits, and waiting may cost) is not in it.

usage: python bench/write_mode.py [--prefill-ms 300] [--setup-ms 100] [--transfer-ms 20] [--requests 30] [--clients 1]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from baton.cluster import Role, TransferMode

START_SECONDS = 30.0
WORDS = {TransferMode.READ: "pull", TransferMode.WRITE: "push"}


@dataclass
class Fleet:
    """One prefill and one decode server, whose KV caches meet in this process.

    Attributes:
        done: by the id of a request, whether its prompt has been computed.
    """

    mode: TransferMode
    prefill_s: float
    setup_s: float
    transfer_s: float
    done: defaultdict[str, asyncio.Event] = field(default_factory=lambda: defaultdict(asyncio.Event))
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def about(self, role: Role) -> dict[str, Any]:
        return {
            "engine_id": f"{self.mode}-{role}",
            "transfer_mode": WORDS[self.mode],
            "role": role.kv_role,
            "side_channel_host": "127.0.0.1",
            "side_channel_port": 5559,
        }

    async def prefill(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(self.prefill_s)
        self.done[request.headers["x-request-id"]].set()
        ticket = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[next(self.numbers)]],
            "remote_engine_id": f"{self.mode}-{Role.PREFILL}",
            "remote_host": "127.0.0.1",
            "remote_port": 5559,
            "transfer_mode": WORDS[self.mode],
        }
        return web.json_response({"choices": [{"index": 0, "text": "x"}], "kv_transfer_params": ticket})

    async def decode(self, request: web.Request) -> web.StreamResponse:
        """The head at once, the first token when the KV cache is here."""
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.setup_s)
        await self.done[request.headers["x-request-id"]].wait()
        await asyncio.sleep(self.transfer_s)
        await response.write(b'data: {"choices": [{"index": 0, "text": "one"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    @contextlib.asynccontextmanager
    async def serving(self, role: Role) -> AsyncIterator[int]:
        """The role's server, up; its port."""

        async def health(_: web.Request) -> web.Response:
            return web.Response()

        async def about(_: web.Request) -> web.Response:
            return web.json_response(self.about(role))

        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_get("/baton/engine", about)
        app.router.add_post("/v1/completions", self.prefill if role is Role.PREFILL else self.decode)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield runner.addresses[0][1]
        finally:
            await runner.cleanup()


@contextlib.asynccontextmanager
async def proxied(fleet: Fleet, client: aiohttp.ClientSession) -> AsyncIterator[str]:
    """A proxy before *fleet*, as a process of its own; its URL."""
    async with fleet.serving(Role.PREFILL) as prefill, fleet.serving(Role.DECODE) as decode:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        argv = (sys.executable, "-m", "baton.cli", "proxy", "--port", str(port), "--log-level", "error")
        engines = ("--prefiller-ports", str(prefill), "--decoder-ports", str(decode))
        process = subprocess.Popen((*argv, *engines), stdout=subprocess.DEVNULL)
        try:
            url = f"http://127.0.0.1:{port}"
            await until_ready(client, url, fleet.mode, process)
            yield url
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)


async def until_ready(
    client: aiohttp.ClientSession, url: str, mode: TransferMode, process: subprocess.Popen[bytes]
) -> None:
    async with asyncio.timeout(START_SECONDS):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the proxy ended with {process.returncode}")
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/readiness") as response:
                    said = await response.json()
                    if response.status == 200 and said["transfer_mode"] != mode:
                        raise SystemExit(
                            f"the proxy took a fleet in {mode} mode for one in {said['transfer_mode']} mode"
                        )
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)


async def first_token(client: aiohttp.ClientSession, url: str) -> float:
    """Seconds to the first event of one stream, which is then read to its end."""
    sent = time.perf_counter()
    async with client.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}) as response:
        if response.status != 200:
            raise SystemExit(f"{response.status}: {await response.text()}")
        await response.content.readuntil(b"\n\n")
        seconds = time.perf_counter() - sent
        await response.read()
    return seconds


async def measure(args: argparse.Namespace) -> dict[TransferMode, list[float]]:
    """Seconds to the first token by mode."""
    delays = (args.prefill_ms / 1e3, args.setup_ms / 1e3, args.transfer_ms / 1e3)
    found: dict[TransferMode, list[float]] = {mode: [] for mode in TransferMode}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        urls = {mode: await stack.enter_async_context(proxied(Fleet(mode, *delays), client)) for mode in TransferMode}
        for number in range(-1, args.requests):
            for mode, url in urls.items():
                times = await asyncio.gather(*(first_token(client, url) for _ in range(args.clients)))
                if number >= 0:  # the first opens connections
                    found[mode] += times
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill-ms", type=float, default=300.0)
    parser.add_argument("--setup-ms", type=float, default=100.0)
    parser.add_argument("--transfer-ms", type=float, default=20.0)
    parser.add_argument("--requests", type=int, default=30, help="one after another, in each mode")
    parser.add_argument("--clients", type=int, default=1, help="at once")
    args = parser.parse_args()
    p50 = {mode: 1e3 * statistics.median(times) for mode, times in asyncio.run(measure(args)).items()}
    print(f"prefill {args.prefill_ms:g} ms, set-up {args.setup_ms:g} ms, transfer {args.transfer_ms:g} ms")
    print("| | read | write | write / read |\n| --- | --- | --- | --- |")
    read, write = p50[TransferMode.READ], p50[TransferMode.WRITE]
    print(f"| first token p50, ms ({args.clients} at once) | {read:.1f} | {write:.1f} | {write / read:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
