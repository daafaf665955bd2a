"""One request through a running cluster, for a person to see: the answer, who served it, what moved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from baton.cluster import Cluster
from baton.launch.lazy import lazily
from baton.launch.probe import counter_sum, url_of

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

NIXL_BYTES = "vllm:nixl_bytes_transferred_sum"
METRICS_SECONDS = 15.0


class TryoutFailed(RuntimeError):
    """The request did not come back whole; the message holds the server's words."""


async def ask(cluster: Cluster, model: str, prompt: str, max_tokens: int, show: Callable[[str], None]) -> None:
    """Stream the greedy answer to *prompt*, then say which instances served it and how much KV moved.

    Raises:
        TryoutFailed: the proxy refused, broke off or cannot be reached.
    """
    try:
        await _ask(cluster, model, prompt, max_tokens, show)
    except aiohttp.ClientError as error:
        raise TryoutFailed(f"the cluster stopped answering: {error or type(error).__name__}") from error


async def _ask(cluster: Cluster, model: str, prompt: str, max_tokens: int, show: Callable[[str], None]) -> None:
    before = await moved_bytes(cluster)
    started = time.monotonic()
    first: float | None = None
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    show(f"\n{prompt}")
    url = url_of(cluster.proxy_host, cluster.proxy_port, "/v1/completions")
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        if response.status != 200:
            raise TryoutFailed(f"the proxy answered {response.status}: {(await response.text())[:300]}")
        async for raw in response.content:
            line = raw.strip()
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise TryoutFailed(f"the stream broke: {event['error'].get('message')}")
            if event.get("choices"):
                first = first or time.monotonic()
                show(event["choices"][0]["text"])
        prefill, decode = response.headers.get("x-baton-prefill"), response.headers.get("x-baton-decode")
    moved = await _moved_since(cluster, before)
    waited = (first or time.monotonic()) - started
    show(
        f"\n\nprefill by {prefill}, decode by {decode}; {moved:,.0f} bytes of KV cache moved over NIXL; "
        f"first token after {waited:.2f} s, all after {time.monotonic() - started:.2f} s\n"
    )


async def moved_bytes(cluster: Cluster) -> float:
    """Bytes that all engines have moved so far, by their own counters: whoever moves them counts."""
    return sum([await counter_sum(each.host, each.port, NIXL_BYTES) for each in cluster.instances])


async def _moved_since(cluster: Cluster, before: float) -> float:
    """The bytes moved since *before*. The engine publishes its counters with its next step or log tick."""
    deadline = time.monotonic() + METRICS_SECONDS
    while True:
        moved = await moved_bytes(cluster) - before
        if moved > 0 or time.monotonic() > deadline:
            return moved
        await asyncio.sleep(0.2)
