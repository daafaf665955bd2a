"""Talking to engines: a pool for each, and what goes wrong turned into answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable

from baton.http import Broken, ClientError, ConnectFailed, Header, Origin, Pool, Response, Timeouts, TooSlow
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance

PROBE_SECONDS = 2.0
SWEEP_SECONDS = 1.0
_JSON = (b"content-type", b"application/json")


class Upstream:
    """Connections to every engine of a fleet.

    Args:
        fleet: whose instances they are.
        timeout_seconds: for one leg from start to end; None waits as long as the client does.
    """

    def __init__(self, fleet: Fleet, timeout_seconds: float | None = None) -> None:
        self._timeout = timeout_seconds
        self._pools = {
            instance.id: Pool(Origin(instance.endpoint.host, instance.endpoint.port), Timeouts()) for instance in fleet
        }

    @contextlib.asynccontextmanager
    async def post(
        self, instance: ProxyInstance, path: bytes, headers: Iterable[Header], body: bytes
    ) -> AsyncIterator[Response]:
        """One leg: the engine's response with its head read; leaving the block frees the connection.

        Leaving it before the body is read closes the connection, which aborts the request on the engine.

        Raises:
            ProxyError: 503 the engine cannot be reached, 502 it broke off, 504 it took too long.
        """
        role = instance.endpoint.role
        try:
            async with (
                asyncio.timeout(self._timeout),
                self._pools[instance.id].request(b"POST", path, [_JSON, *headers], body) as response,
            ):
                yield response
        except ConnectFailed as error:
            instance.set_usable(False, str(error))
            raise ProxyError(503, f"the {role} server cannot be reached", retry_after=1) from error
        except (TimeoutError, TooSlow) as error:
            raise ProxyError(504, f"the {role} server took too long") from error
        except Broken as error:
            raise ProxyError(502, f"the {role} server broke off its answer") from error

    async def get(self, instance: ProxyInstance, path: bytes, headers: Iterable[Header]) -> tuple[int, bytes, bytes]:
        """Status, content type and body of a GET.

        Raises:
            ProxyError: 502, the engine did not answer.
        """
        try:
            async with self._pools[instance.id].request(b"GET", path, headers) as response:
                return response.status, response.header(b"content-type") or b"application/json", await response.read()
        except ClientError as error:
            raise ProxyError(502, f"the {instance.endpoint.role} server did not answer") from error

    async def probe(self, fleet: Fleet) -> None:
        """Ask every instance for its health, all at once."""
        await asyncio.gather(*(self._probe(instance) for instance in fleet))

    async def _probe(self, instance: ProxyInstance) -> None:
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                self._pools[instance.id].request(b"GET", b"/health", ()) as response,
            ):
                await response.read()
                instance.set_usable(response.status == 200, f"/health answered {response.status}")
        except (ClientError, TimeoutError) as error:
            instance.set_usable(False, f"/health failed: {error or 'too slow'}")

    async def sweep_forever(self) -> None:
        """Close connections that were idle for too long, once a second."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for pool in self._pools.values():
                pool.sweep()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
