"""Asking a server of ours whether it is well, and what its counters say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from baton.counters import total
from baton.launch.lazy import lazily
from baton.launch.supervisor import Probe

if TYPE_CHECKING:
    import aiohttp
else:
    aiohttp = lazily("aiohttp")

PROBE_SECONDS = 2.0


def url_of(host: str, port: int, path: str) -> str:
    """A URL that reaches a server bound to *host*, also when that is "all addresses"."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}{path}" if ":" in host else f"http://{host}:{port}{path}"


def answers(host: str, port: int, path: str, good: Callable[[bytes], bool] = lambda _: True) -> Probe:
    """A probe: whether GET *path* answers 200 within two seconds, with a body that is *good*."""
    url = url_of(host, port, path)

    async def probe() -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
                return response.status == 200 and good(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    return probe


async def counter_sum(host: str, port: int, name: str) -> float:
    """The sum over all labels of one sample of a server's /metrics; 0 when it has none.

    Raises:
        aiohttp.ClientError: the server does not answer.
    """
    return await counter_if_any(host, port, name) or 0.0


async def counter_if_any(host: str, port: int, name: str) -> float | None:
    """The same, and None when it has none.

    Raises:
        aiohttp.ClientError: the server does not answer.
    """
    async with aiohttp.ClientSession() as session, session.get(url_of(host, port, "/metrics")) as response:
        return total(await response.read(), name.encode())
