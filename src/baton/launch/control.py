"""How a running cluster is spoken to: the supervisor listens on a Unix socket, commands ask there.

A change answers with a line of JSON for each thing that it says, and a last one that says how it ended. Whoever may
open the socket may change the cluster: it lies in a folder of the user's own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from baton.cluster import Role
from baton.launch.errors import LaunchError
from baton.launch.lazy import lazily
from baton.launch.operate import Operator, Say
from baton.launch.proxy_client import ProxyRefused
from baton.launch.record import ClusterRecord

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web
else:
    aiohttp, web = lazily("aiohttp"), lazily("aiohttp.web")

SOCKET = "control"
STATUS_SECONDS = 5.0
GRACE_SECONDS = 0.5

Change = Callable[[Say], Awaitable[None]]


class ControlFailed(RuntimeError):
    """The supervisor could not do it, or cannot be asked; the message says why."""


@contextlib.asynccontextmanager
async def listening(operator: Operator, path: Path) -> AsyncIterator[None]:
    """Take commands for *operator* at the Unix socket *path*."""
    app = web.Application()

    async def status(_: web.Request) -> web.Response:
        return web.json_response({"processes": operator.status()}, dumps=_text)

    async def scale(request: web.Request) -> web.StreamResponse:
        wanted = {Role(role): count for role, count in (await request.json()).items()}
        return await _tell(request, lambda say: operator.scale(wanted, say))

    async def drain(request: web.Request) -> web.StreamResponse:
        names = await request.json()
        return await _tell(request, lambda say: operator.drain(names, say))

    async def restart(request: web.Request) -> web.StreamResponse:
        names = await request.json()
        return await _tell(request, lambda say: operator.restart(names, say))

    app.router.add_get("/status", status)
    app.router.add_post("/scale", scale)
    app.router.add_post("/drain", drain)
    app.router.add_post("/restart", restart)
    # A supervisor that stops does not wait for a change that is under way.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=GRACE_SECONDS)
    await runner.setup()
    try:
        # One that a former supervisor has left is replaced.
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


async def _tell(request: web.Request, change: Change) -> web.StreamResponse:
    """Make *change* and stream what it says. It goes on when its listener leaves."""
    response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
    await response.prepare(request)
    lines: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def make() -> None:
        try:
            await change(lambda text: lines.put_nowait({"say": text}))
            lines.put_nowait({"done": True})
        except (LaunchError, ProxyRefused) as error:
            lines.put_nowait({"error": str(error)})
        except Exception as error:
            lines.put_nowait({"error": f"{type(error).__name__}: {error}"})
            raise

    task = asyncio.create_task(make())
    try:
        while True:
            line = await lines.get()
            with contextlib.suppress(ConnectionError):
                await response.write(orjson.dumps(line) + b"\n")
            if "say" not in line:
                break
    finally:
        if not task.done():
            await asyncio.shield(task)
    return response


def _text(value: Any) -> str:
    return orjson.dumps(value).decode()


async def ask_status(record: ClusterRecord) -> list[dict[str, Any]]:
    """What the supervisor says of each process.

    Raises:
        ControlFailed: it cannot be asked.
    """
    async with _session(record, STATUS_SECONDS) as session, _asked(record), session.get("http://up/status") as response:
        rows: list[dict[str, Any]] = orjson.loads(await response.read())["processes"]
        return rows


async def ask_change(record: ClusterRecord, what: str, body: object, show: Say) -> None:
    """Have the supervisor change something, and show what it says meanwhile.

    Raises:
        ControlFailed: it did not do it, or not all of it.
    """
    async with (
        _session(record, None) as session,
        _asked(record),
        session.post(f"http://up/{what}", json=body) as response,
    ):
        async for raw in response.content:
            line = orjson.loads(raw)
            if "say" in line:
                show(line["say"])
            elif "error" in line:
                raise ControlFailed(line["error"])
            else:
                return
    raise ControlFailed("the supervisor broke off: see `baton status`")


def _session(record: ClusterRecord, seconds: float | None) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(record.control)), timeout=aiohttp.ClientTimeout(total=seconds)
    )


@contextlib.asynccontextmanager
async def _asked(record: ClusterRecord) -> AsyncIterator[None]:
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ControlFailed(
            f"the supervisor (pid {record.supervisor.pid}) cannot be asked: {error or type(error).__name__}"
        ) from error
