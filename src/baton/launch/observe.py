"""What a running cluster is doing, put together from whoever knows: its supervisor, its proxy, its engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from baton.launch.cluster_run import PROXY, here
from baton.launch.control import ControlFailed, ask_status
from baton.launch.lazy import lazily
from baton.launch.proxy_client import ProxyClient, ProxyRefused
from baton.launch.record import ClusterRecord, runs

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

ENGINE_SECONDS = 1.0
"""Limit for all that one engine is asked; all are asked at once."""
MOST_ENGINES = 64
"""Of more than these the engines themselves are not asked: the proxy knows their health and load."""

GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_cache_usage",
    "vllm:nixl_bytes_transferred_sum": "bytes_moved",
}
"""What is read off an engine's metrics, and our word for it."""


async def observe(record: ClusterRecord, environ: Mapping[str, str]) -> dict[str, Any]:
    """The whole state of the cluster of *record*: the same object that `baton status --json` prints."""
    proxy = ProxyClient.of(record.cluster, environ)
    supervised = record.supervised
    rows, (routed, engines) = await asyncio.gather(_processes(record), _seen(proxy, record))
    by_url = {row["url"]: row for row in routed or []}
    for row in rows:
        row["proxy"] = by_url.get(row["url"])
        row["engine"] = engines.get(row["id"])
    return {
        "name": record.name,
        "model": record.served_model,
        "proxy": proxy.url,
        "supervisor": {"pid": record.supervisor.pid, "running": supervised},
        "proxy_answers": routed is not None,
        "processes": rows,
    }


async def observe_proxy(proxy: ProxyClient) -> dict[str, Any]:
    """The same of a fleet of which only the proxy is known.

    Raises:
        ProxyRefused: it cannot be asked.
    """
    rows = [
        {"id": row["id"], "role": row["role"], "url": row["url"], "state": state_of(row), "proxy": row, "engine": None}
        for row in await proxy.instances()
    ]
    return {"name": None, "model": None, "proxy": proxy.url, "proxy_answers": True, "processes": rows}


def state_of(row: Mapping[str, Any]) -> str:
    """One word for an instance as the proxy sees it."""
    return str(row.get("state") or ("usable" if row["usable"] else "out"))


async def _processes(record: ClusterRecord) -> list[dict[str, Any]]:
    """What the supervisor says; without one, which processes of its record still run."""
    if record.supervised:
        try:
            return await ask_status(record)
        except ControlFailed:
            pass
    urls = {each.id: (str(each.role), each.url) for each in record.cluster.instances}
    proxy = (PROXY, ProxyClient.of(record.cluster, {}).url)
    known = {each.name: each for each in record.processes}
    rows: list[dict[str, Any]] = []
    rows_of = {**urls, PROXY: proxy}
    for name in here(record.cluster, record.node):
        role, url = rows_of[name]
        process = known.get(name)
        alive = process is not None and runs(process)
        rows.append(
            {
                "id": name,
                "role": role,
                "url": url,
                "state": "running" if alive else "gone",
                "pid": process.pid if process is not None and alive else None,
                "seconds": round(time.time() - process.created, 1) if process is not None and alive else None,
                "boots": process.boots if process is not None else 0,
                "failures": 0,
                "last_failure": None,
                "restart_in_seconds": None,
                "log": str(process.log) if process is not None else None,
            }
        )
    return rows


async def _seen(
    proxy: ProxyClient, record: ClusterRecord
) -> tuple[list[dict[str, Any]] | None, dict[str, dict[str, Any] | None]]:
    """The proxy's rows, None when it cannot be asked, and what each engine says of itself."""
    instances = record.cluster.on(record.node)

    async def routed() -> list[dict[str, Any]] | None:
        try:
            return await proxy.instances()
        except ProxyRefused:
            return None

    if len(instances) > MOST_ENGINES:
        return await routed(), {}
    # Two connections each, more than a session has unasked.
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        rows, *engines = await asyncio.gather(routed(), *(_engine(session, each.url) for each in instances))
    return rows, {each.id: engine for each, engine in zip(instances, engines, strict=True)}


async def _engine(session: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """An engine's load, KV cache use, bytes moved and version; None when it does not answer in time."""
    try:
        async with asyncio.timeout(ENGINE_SECONDS):
            counts, version = await asyncio.gather(_counts(session, url), _version(session, url))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return None
    return {**counts, "version": version}


async def _counts(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        return gauges((await response.text()).splitlines())


async def _version(session: aiohttp.ClientSession, url: str) -> str | None:
    async with session.get(f"{url}/version") as response:
        return (await response.json()).get("version") if response.status == 200 else None


def gauges(lines: Iterable[str]) -> dict[str, float]:
    """The sums over all labels of :data:`GAUGES` in a metrics text; the KV cache's use is the fullest rank's.

    Read by hand: a parser of the whole text takes a hundred times as long.
    """
    found: dict[str, float] = {}
    for line in lines:
        name = line.partition("{")[0].partition(" ")[0]
        word = GAUGES.get(name)
        if word is None:
            continue
        value = float(line.rpartition(" ")[2])
        before = found.get(word, 0.0)
        found[word] = max(before, value) if word == "kv_cache_usage" else before + value
    return found
