"""The proxy as a server: routes, the way back to the client, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler

from baton.cluster import Endpoint
from baton.proxy import admin, legs
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.journey import Journey, State, Way
from baton.proxy.metrics import Metrics
from baton.proxy.modes import run_read
from baton.proxy.routing import POLICIES
from baton.proxy.upstream import Upstream

logger = logging.getLogger("baton.proxy")

MAX_BODY_BYTES = 64 << 20
RETRY_SECONDS = 0.25
_FORWARDED = ("Authorization", "traceparent", "tracestate")
WAY = web.AppKey("way", Way)


@dataclass(frozen=True)
class ProxySettings:
    """What `baton proxy` was asked for.

    Attributes:
        host, port: where to listen.
        endpoints: the engines of both roles.
        policy: how an instance is chosen, by name.
        request_timeout_seconds: for one leg; None has no limit.
        probe_interval_seconds: between two rounds of health questions.
        shutdown_seconds: how long open requests may go on after a stop was asked for.
    """

    host: str
    port: int
    endpoints: tuple[Endpoint, ...]
    policy: str = "round_robin"
    request_timeout_seconds: float | None = None
    probe_interval_seconds: float = 2.0
    shutdown_seconds: float = 30.0


async def serve(settings: ProxySettings, on_ready: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is open and return.

    Raises:
        OSError: the address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        build_app(settings),
        # A client that leaves cancels its journey, and with it the leg that is under way.
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=settings.shutdown_seconds,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.port, backlog=1024).start()
        on_ready()
        await stop.wait()
    finally:
        await runner.cleanup()


def build_app(settings: ProxySettings) -> web.Application:
    """The application, with nothing started yet."""
    fleet = Fleet(settings.endpoints)
    policy = POLICIES[settings.policy]
    way = Way(fleet, Upstream(settings.request_timeout_seconds), policy(), policy(), Metrics(fleet))
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
    app[WAY] = way
    for path in legs.GENERATION:
        app.router.add_post(path, _generate)
    admin.add_routes(app, way)

    async def upstream(_: web.Application) -> AsyncIterator[None]:
        await way.upstream.open()
        await way.upstream.probe(fleet)
        probing = asyncio.create_task(_probe_forever(way, settings.probe_interval_seconds))
        yield
        probing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await probing
        await way.upstream.close()

    app.cleanup_ctx.append(upstream)
    return app


async def _probe_forever(way: Way, interval_seconds: float) -> None:
    while True:
        # One that is out is asked more often, so that it is missed no longer than need be.
        out = not all(instance.usable for instance in way.fleet)
        await asyncio.sleep(min(interval_seconds, RETRY_SECONDS) if out else interval_seconds)
        await way.upstream.probe(way.fleet)


class _Reply:
    """The way back to one client, on aiohttp's response objects."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._headers = headers
        self.response: web.StreamResponse | None = None

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.response = web.Response(status=status, headers={**headers, **self._headers}, body=body)

    async def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.response = web.StreamResponse(status=status, headers={**headers, **self._headers})
        await self.response.prepare(self._request)

    async def chunk(self, data: bytes) -> None:
        assert self.response is not None, "the head goes first"
        await self.response.write(data)


async def _generate(request: web.Request) -> web.StreamResponse:
    """Both phases, for every endpoint in ``legs.GENERATION``."""
    way = request.app[WAY]
    request_id = uuid.uuid4().hex
    reply = _Reply(request, {"X-Request-Id": request.headers.get("X-Request-Id", request_id)})
    carried = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
    journey = Journey(
        request.path, legs.check(await _json(request)), request_id, {**carried, "X-Request-Id": request_id}
    )
    status = 499  # the client left
    try:
        status = await run_read(journey, way, reply)
        journey.state = State.DONE
    except asyncio.CancelledError:
        journey.state = State.CANCELLED
        raise
    except (ProxyError, NoInstance) as error:
        journey.state = State.FAILED
        status = error.status if isinstance(error, ProxyError) else 503
        raise
    finally:
        way.metrics.requests.labels(request.path, status).inc()
        way.metrics.request_seconds.observe(time.monotonic() - journey.arrived)
    assert reply.response is not None
    return reply.response


async def _json(request: web.Request) -> object:
    body = await request.read()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProxyError(400, f"the body is not JSON: {error}") from error


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Everything that is not an engine's answer becomes one in OpenAI's shape."""
    try:
        return await handler(request)
    except (legs.Refused, NoInstance, ProxyError, web.HTTPException) as error:
        return _answer(_as_proxy_error(error, request))


def _as_proxy_error(error: Exception, request: web.Request) -> ProxyError:
    match error:
        case ProxyError():
            return error
        case legs.Refused():
            return ProxyError(400, str(error), param=error.param)
        case NoInstance():
            return ProxyError(503, str(error), retry_after=1)
    assert isinstance(error, web.HTTPException)
    messages = {
        404: f"there is nothing at {request.path}",
        405: f"{request.method} is not allowed on {request.path}",
        413: f"the body is over {MAX_BODY_BYTES} bytes",
    }
    return ProxyError(error.status, messages.get(error.status, error.reason))


def _answer(error: ProxyError) -> web.Response:
    return web.Response(
        status=error.status, body=error.body(), headers=error.headers(), content_type="application/json"
    )
