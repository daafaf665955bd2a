"""Talking to engines over HTTP: the one place that uses the HTTP client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import orjson

from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance

CONNECT_SECONDS = 5.0
PROBE_SECONDS = 2.0
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)


class Upstream:
    """A client for every engine, with pooled connections.

    Args:
        timeout_seconds: for one leg from start to end; None waits as long as the client does.
    """

    def __init__(self, timeout_seconds: float | None = None) -> None:
        self._timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=CONNECT_SECONDS)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=self._timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def post(
        self, instance: ProxyInstance, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One leg: the engine's response with its head read; leaving the block frees the connection.

        Leaving it before the body is read closes the connection, which aborts the request on the engine.

        Raises:
            ProxyError: 503 the engine cannot be reached, 502 it broke, 504 it took too long.
        """
        send = {**headers, "Content-Type": "application/json"}
        with _as_proxy_errors(instance):
            async with self._client.post(
                f"{instance.endpoint.url}{path}", data=orjson.dumps(body), headers=send
            ) as response:
                yield response

    async def get(self, instance: ProxyInstance, path: str, headers: Mapping[str, str]) -> tuple[int, str, bytes]:
        """Status, content type and body of a GET."""
        with _as_proxy_errors(instance):
            async with self._client.get(f"{instance.endpoint.url}{path}", headers=headers) as response:
                return response.status, response.headers.get("Content-Type", ""), await response.read()

    async def probe(self, fleet: Fleet) -> None:
        """Ask every instance for its health, all at once."""
        await asyncio.gather(*(self._probe(instance) for instance in fleet))

    async def _probe(self, instance: ProxyInstance) -> None:
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
            async with self._client.get(f"{instance.endpoint.url}/health", timeout=timeout) as response:
                instance.set_usable(response.status == 200, f"/health answered {response.status}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            instance.set_usable(False, f"/health failed: {type(error).__name__}")

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "open() first"
        return self._session


@contextlib.contextmanager
def _as_proxy_errors(instance: ProxyInstance) -> Any:
    """Turn a client library's errors into answers, and note an engine that is not there."""
    role = instance.endpoint.role
    try:
        yield
    except _UNREACHABLE as error:
        instance.set_usable(False, f"cannot connect: {type(error).__name__}")
        raise ProxyError(503, f"the {role} server cannot be reached", retry_after=1) from error
    except TimeoutError as error:
        raise ProxyError(504, f"the {role} server took too long") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ProxyError(502, f"the {role} server broke off its answer") from error
