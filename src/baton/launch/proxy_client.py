"""The running proxy, asked to take instances in, to drain them, and to let them go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from baton.cluster import Cluster, Endpoint
from baton.launch.commands import flag_value
from baton.launch.lazy import lazily
from baton.launch.probe import url_of

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

ASK_SECONDS = 5.0
LOOK_SECONDS = 0.1


class ProxyRefused(RuntimeError):
    """The proxy did not do what was asked of it; the message says why."""


class ProxyClient:
    """The proxy of one cluster.

    Args:
        url: where it is, without a path.
        key: what administers it; None when it asks for none.
    """

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    @classmethod
    def of(cls, cluster: Cluster, environ: Mapping[str, str]) -> ProxyClient:
        flags: Sequence[str] = cluster.proxy_flags
        key = flag_value(flags, "--admin-key") or environ.get("BATON_ADMIN_KEY") or flag_value(flags, "--api-key")
        return cls(url_of(cluster.proxy_host, cluster.proxy_port, ""), key)

    async def instances(self) -> list[dict[str, Any]]:
        """What it says of each instance.

        Raises:
            ProxyRefused: it cannot be reached, or refuses.
        """
        rows: list[dict[str, Any]] = (await self._ask("GET", "/instances"))["instances"]
        return rows

    async def add(self, endpoint: Endpoint) -> None:
        """Have it route to one more engine, or again to one that was drained."""
        row = await self._row(endpoint.url)
        if row is None or row.get("draining"):
            await self._ask("POST", "/instances", {"role": str(endpoint.role), "url": endpoint.url})

    async def drain(self, url: str, seconds: float) -> bool:
        """Have it send nothing more to the engine at *url*, and wait until what is under way there is done.

        Returns:
            Whether all of it was done within *seconds*.
        """
        row = await self._row(url)
        if row is None:
            return True
        await self._ask("POST", f"/instances/{row['id']}/drain")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            row = await self._row(url)
            if row is None or is_drained(row):
                return True
            await asyncio.sleep(LOOK_SECONDS)
        return False

    async def remove(self, url: str) -> None:
        """Have it forget the engine at *url*."""
        row = await self._row(url)
        if row is not None:
            await self._ask("DELETE", f"/instances/{row['id']}")

    async def _row(self, url: str) -> dict[str, Any] | None:
        return next((row for row in await self.instances() if row["url"] == url), None)

    async def _ask(self, method: str, path: str, body: object = None) -> Any:
        timeout = aiohttp.ClientTimeout(total=ASK_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=self._headers) as session,
                session.request(method, f"{self.url}{path}", json=body) as response,
            ):
                if response.status >= 300:
                    said = (await response.text())[:300]
                    raise ProxyRefused(f"the proxy answered {response.status} to {method} {path}: {said}")
                return orjson.loads(await response.read()) if response.status != 204 else None
        except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as error:
            raise ProxyRefused(f"the proxy at {self.url} cannot be asked: {error or type(error).__name__}") from error


def is_drained(row: Mapping[str, Any]) -> bool:
    """Whether nothing is under way on an instance that gets nothing new."""
    return not any(row.get(count) for count in ("waiting", "in_flight", "held"))
