"""Clients that leave, on real engines: nothing stays pinned, nothing dies."""

from __future__ import annotations

import asyncio
import random

import aiohttp

from tests.e2e import prompts
from tests.e2e.conftest import MODEL, Pair
from tests.e2e.engines import eventually, generate

CLIENTS = 60
LEASE_SECONDS = 30.0


def test_clients_that_leave_at_any_moment_leave_no_block_behind(pair: Pair) -> None:
    """Each leaves at a moment of its own between the first byte of prefill and well into decode.

    The blocks of a request whose decode server never heard of it would be pinned for the whole lease.
    """
    tokens = prompts.text_tokens(pair.decode.url, MODEL)[:400]
    moments = random.Random(7)

    async def one(client: aiohttp.ClientSession, number: int) -> None:
        body = {
            "model": MODEL,
            "prompt": tokens[number:],
            "max_tokens": 200,
            "stream": number % 2 == 0,
            "cache_salt": f"leaving-{number}",
        }
        try:
            async with (
                asyncio.timeout(moments.uniform(0.01, 1.5)),
                client.post(f"{pair.proxy.url}/v1/completions", json=body) as response,
            ):
                await response.read()
        except TimeoutError:
            pass

    async def storm() -> None:
        async with aiohttp.ClientSession() as client:
            for start in range(0, CLIENTS, 6):
                await asyncio.gather(*(one(client, number) for number in range(start, start + 6)))

    def pinned() -> float:
        return pair.prefill.metric("vllm:kv_cache_usage_perc")

    # Other tests may have left a ticket unused: its blocks are free after the lease.
    assert eventually(pinned, 0.0, 4 * LEASE_SECONDS) == 0.0
    asyncio.run(storm())
    # Within twenty seconds of the last one: what is stranded stays for thirty.
    for server in (pair.prefill, pair.decode):
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            left = eventually(lambda gauge=gauge, server=server: server.metric(gauge), 0.0, 2 * LEASE_SECONDS / 3)  # type: ignore[misc]
            assert left == 0.0, (server.name, gauge)
    assert pair.proxy.metric("baton_in_flight") == 0
    assert pair.proxy.metric("baton_active_requests") == 0
    assert pair.proxy.metric("baton_cancelled_requests_total") > CLIENTS / 2
    assert generate(pair.proxy.url, {"model": MODEL, "prompt": "still well", "max_tokens": 1})
