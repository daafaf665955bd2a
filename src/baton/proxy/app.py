"""The proxy as a server: what answers at which path, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import orjson

from baton.cluster import Endpoint
from baton.http import Header, Limits, Request, Responder, Server
from baton.proxy import legs
from baton.proxy.admin import Answer, admin_routes
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, NoInstance
from baton.proxy.journey import Journey, State, Way
from baton.proxy.metrics import Metrics
from baton.proxy.modes import run_read
from baton.proxy.routing import POLICIES
from baton.proxy.upstream import Upstream

logger = logging.getLogger("baton.proxy")

RETRY_SECONDS = 0.25
_FORWARDED = frozenset((b"authorization", b"traceparent", b"tracestate"))
_JSON = (b"content-type", b"application/json")
# Request ids: random for each start, then counted; a random number each would cost a system call.
_BOOT = secrets.token_hex(10).encode()
_NUMBERS = itertools.count()


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
        limits: of the HTTP server.
    """

    host: str
    port: int
    endpoints: tuple[Endpoint, ...]
    policy: str = "round_robin"
    request_timeout_seconds: float | None = None
    probe_interval_seconds: float = 2.0
    shutdown_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)


class Proxy:
    """A running proxy: start, stop, and between them one handler for every request."""

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.fleet = Fleet(settings.endpoints)
        policy = POLICIES[settings.policy]
        upstream = Upstream(self.fleet, settings.request_timeout_seconds)
        self.way = Way(self.fleet, upstream, policy(), policy(), Metrics(self.fleet))
        self._admin = admin_routes(self.way)
        self._server = Server(self.handle, settings.limits, refusal)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> list[tuple[str, int]]:
        """Listen; the bound addresses. The engines have been asked for their health once.

        Raises:
            OSError: the address cannot be had.
        """
        await self.way.upstream.probe(self.fleet)
        addresses = await self._server.listen(self.settings.host, self.settings.port)
        work = (self._probe_forever(), self.way.upstream.sweep_forever())
        self._background = [asyncio.create_task(each) for each in work]
        return addresses

    async def stop(self, grace_seconds: float) -> None:
        """Take no more requests, finish what is open for *grace_seconds*, then cut the rest."""
        for task in self._background:
            task.cancel()
        await self._server.close(grace_seconds)
        self.way.upstream.close()

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request, whatever it is."""
        try:
            if request.path in legs.RULES and request.method == "POST":
                await self._generate(request, responder)
            else:
                answer = await self._answer(request)
                responder.send(answer.status, answer.headers, answer.body)
        except (legs.Refused, NoInstance, ProxyError) as error:
            if responder.started:
                responder.abort()
                return
            told = as_proxy_error(error)
            responder.send(told.status, [_JSON, *told.headers()], told.body())

    async def _answer(self, request: Request) -> Answer:
        """What is not generation."""
        methods = self._admin.get(request.path)
        if methods is None:
            if request.path not in legs.RULES:
                raise ProxyError(404, f"there is nothing at {request.path}")
            methods = {}
        make = methods.get("GET" if request.method == "HEAD" else request.method)
        if make is None:
            allowed = ", ".join(sorted(methods)) or "POST"
            raise ProxyError(405, f"{request.method} is not allowed on {request.path}", allow=allowed)
        return await make(request)

    async def _generate(self, request: Request, responder: Responder) -> None:
        """Both phases, for every endpoint in ``legs.RULES``."""
        arrived = time.monotonic()
        status = 499  # the client left
        journey: Journey | None = None
        try:
            journey = begin(request, arrived)
            status = await run_read(journey, self.way, responder)
            journey.state = State.DONE
        except asyncio.CancelledError:
            if journey is not None:
                journey.state = State.CANCELLED
            raise
        except (legs.Refused, NoInstance, ProxyError) as error:
            if journey is not None:
                journey.state = State.FAILED
            status = as_proxy_error(error).status
            raise
        finally:
            self.way.metrics.request(request.path, status, time.monotonic() - arrived)

    async def _probe_forever(self) -> None:
        while True:
            # One that is out is asked more often, so that it is missed no longer than need be.
            out = not all(instance.usable for instance in self.fleet)
            interval = self.settings.probe_interval_seconds
            await asyncio.sleep(min(interval, RETRY_SECONDS) if out else interval)
            await self.way.upstream.probe(self.fleet)


def begin(request: Request, arrived: float) -> Journey:
    """The journey of a request, with its body parsed and checked.

    Raises:
        ProxyError: the body is no JSON, or compressed.
        legs.Refused: it asks for what cannot be handed over.
    """
    coding = request.header(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        raise ProxyError(415, "a compressed body is not supported: send it as it is")
    try:
        body = legs.check(orjson.loads(request.body), legs.RULES[request.path])
    except orjson.JSONDecodeError as error:
        raise ProxyError(400, f"the body is not JSON: {error}") from error
    request_id = _BOOT + b"%012x" % next(_NUMBERS)
    carried: list[Header] = [pair for pair in request.headers if pair[0] in _FORWARDED]
    own_id = request.header(b"x-request-id") or request_id
    return Journey(
        request, body, request_id, [*carried, (b"x-request-id", request_id)], [(b"x-request-id", own_id)], arrived
    )


def as_proxy_error(error: Exception) -> ProxyError:
    """The answer for what went wrong."""
    match error:
        case ProxyError():
            return error
        case legs.Refused():
            return ProxyError(400, str(error), param=error.param)
        case NoInstance():
            return ProxyError(503, str(error), retry_after=1)
    raise AssertionError(f"not an error of ours: {error!r}")


def refusal(status: int, reason: str) -> tuple[bytes, bytes]:
    """What the HTTP server says by itself, in OpenAI's shape."""
    return b"application/json", ProxyError(status, reason).body()


async def serve(settings: ProxySettings, on_ready: Callable[[list[tuple[str, int]]], None] = lambda _: None) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is open and return.

    Raises:
        OSError: the address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    proxy = Proxy(settings)
    try:
        on_ready(await proxy.start())
        await stop.wait()
    finally:
        stopping = asyncio.ensure_future(proxy.stop(settings.shutdown_seconds))
        for number in (signal.SIGINT, signal.SIGTERM):
            # Asked a second time: cut what is still open.
            loop.add_signal_handler(number, partial(stopping.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
