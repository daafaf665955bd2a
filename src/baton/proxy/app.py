"""The proxy as a server: what answers at which path, start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import signal
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from baton.cluster import Endpoint, Role, TransferMode
from baton.http import Header, Limits, Request, Responder, Server
from baton.proxy import legs
from baton.proxy.access_log import AccessLog
from baton.proxy.admin import ADMIN, OPEN, by_first, instance_routes, reasons_route, routes, worker_routes
from baton.proxy.admission import Gate
from baton.proxy.attempts import Retries
from baton.proxy.beat import Beats
from baton.proxy.breaker import USUAL_BREAKER, BreakerRules, ProbeRules
from baton.proxy.client_tickets import Signer
from baton.proxy.deadlines import Deadlines
from baton.proxy.deliver import ToClient
from baton.proxy.door import Keys, Origins, carried, decode_rank
from baton.proxy.errors import JSON, ProxyError, StreamFailed, error_event
from baton.proxy.fleet import Fleet, NoInstance, ProxyInstance
from baton.proxy.forever import forever
from baton.proxy.health import Watch
from baton.proxy.journey import EngineRefusal, Journey, State, Times, Way
from baton.proxy.legs import Rules, Style
from baton.proxy.members import FLEET_PATH, Members
from baton.proxy.memory import settle_memory
from baton.proxy.metrics import Metrics
from baton.proxy.modes import run_prefill_alone, run_several, run_single, turn_of
from baton.proxy.outstanding import Outstanding
from baton.proxy.release import Releases
from baton.proxy.routing import POLICIES
from baton.proxy.samples import parts
from baton.proxy.tracing import Tracer
from baton.proxy.transfer_policy import OnNoTransfer
from baton.proxy.transfers import Transfers
from baton.proxy.turns import MOST_TURNS, TTL_SECONDS, TurnStore
from baton.proxy.upstream import USUAL_PATIENCE, Answer, Patience, Upstream
from baton.proxy.warm_up import REASONS_PATH, FirstWorkers, WarmUp
from baton.proxy.workers import Alive, Peers, Worker, Workers, watch_parent

logger = logging.getLogger("baton.proxy")

RELEASE_SECONDS = 1.0
"""How long a stop waits for decode servers to be told of tickets that nobody will use."""
FLUSH_SECONDS = 1.0
LEFT = 499
"""The status that is counted for a request whose client left before its answer was whole."""

Told = (legs.Refused, NoInstance, ProxyError, EngineRefusal, StreamFailed)


@dataclass(frozen=True)
class ProxySettings:
    """What `baton proxy` was asked for.

    Attributes:
        host, port: where to listen.
        endpoints: the engines of both roles.
        policy: how an instance is chosen, by name, in both pools.
        prefill_policy, decode_policy: in one pool; None as *policy*.
        transfer_mode: what the engines must be; None asks them.
        request_timeout_seconds: for a request, from its arrival to the last byte of its answer; None has no limit.
        patience: how long a leg is waited for of which nothing is heard.
        retries: how often a request that an engine failed is tried again.
        ticket_max_age_seconds: how old a ticket may be when a decode server gets it; None goes by its lease.
        probe_interval_seconds, probe_timeout_seconds: between two probes of an instance, and for one.
        probe_failures, probe_successes: in a row that take an instance out, and in again.
        probe_path: what is asked for.
        breaker: when an instance is taken out for requests that failed.
        instances_file: that names the instances, and is read again when it changes; they are *endpoints* at first.
        shutdown_seconds: how long open requests may go on after a stop was asked for.
        limits: of the HTTP server.
        uds: a Unix socket to listen on in place of host and port.
        tls: for clients.
        engine_tls: for engines that are reached by https.
        api_keys: one of them is asked of every client; empty asks for none.
        admin_key: what administers; None leaves it to the API keys.
        engine_api_key: what engines are given when the client brings no key of its own.
        cors_origins: the web origins whose pages may call.
        max_requests: under way at once; None has no limit.
        max_decode_requests: the same at each decode server, with those that are still in prefill; None has no limit.
        queue_size, queue_seconds: how many more may wait, and how long.
        keep_alive_seconds: of silence after which a stream gets a comment; None sends none.
        request_id_headers: where a client's own id may stand, in lower case.
        name_instances: whether answers say which instances made them.
        access_log: a file, ``-`` for standard output, None for none.
        otlp_endpoint: where spans go; None makes none.
        turns: whether the KV cache of an answer is kept for the conversation's next request (bidirectional KV).
        turn_ttl_seconds: how long; less than decode servers keep their blocks.
        max_turns: at a time.
        client_tickets: with *turns*: whether clients get tickets that they may echo.
        reuse_port: whether others may listen on the same port: workers of one proxy do.
        worker_socket: a Unix socket on which this worker tells the others what it counts; None for a proxy of one.
        other_workers: theirs.
        first_worker: the one of them that warms up for all; None when this one does.
        warm_up: whether each pair does one small hand-off before health is good.
        warm_up_seconds: limit for one pair.
        on_no_transfer: what becomes of requests and of readiness when nothing is transferred; None is fail until the
            proxy was ready once, and warn from then on.
        scrape_seconds: between two looks at what engines count; 0 for none.
    """

    host: str
    port: int
    endpoints: tuple[Endpoint, ...]
    policy: str = "round_robin"
    prefill_policy: str | None = None
    decode_policy: str | None = None
    transfer_mode: TransferMode | None = None
    request_timeout_seconds: float | None = None
    patience: Patience = USUAL_PATIENCE
    retries: Retries = field(default_factory=Retries)
    ticket_max_age_seconds: float | None = None
    probe_interval_seconds: float = ProbeRules.interval_seconds
    probe_timeout_seconds: float = ProbeRules.timeout_seconds
    probe_failures: int = ProbeRules.failures
    probe_successes: int = ProbeRules.successes
    probe_path: str = "/health"
    breaker: BreakerRules = USUAL_BREAKER
    instances_file: str | None = None
    shutdown_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    uds: str | None = None
    tls: ssl.SSLContext | None = None
    engine_tls: ssl.SSLContext | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_key: str | None = field(default=None, repr=False)
    engine_api_key: str | None = field(default=None, repr=False)
    cors_origins: tuple[str, ...] = ()
    max_requests: int | None = None
    max_decode_requests: int | None = None
    queue_size: int = 100
    queue_seconds: float = 60.0
    keep_alive_seconds: float | None = None
    request_id_headers: tuple[str, ...] = ("x-request-id",)
    name_instances: bool = True
    access_log: str | None = None
    otlp_endpoint: str | None = None
    turns: bool = False
    turn_ttl_seconds: float = TTL_SECONDS
    max_turns: int = MOST_TURNS
    client_tickets: bool = False
    reuse_port: bool = False
    worker_socket: str | None = None
    other_workers: tuple[str, ...] = ()
    first_worker: str | None = None
    warm_up: bool = False
    warm_up_seconds: float = 30.0
    on_no_transfer: OnNoTransfer | None = None
    scrape_seconds: float = 0.0


class Proxy:
    """A running proxy: start, stop, and between them one handler for every request.

    Args:
        settings: what was asked for.

    Raises:
        TracingUnavailable: spans are wanted and OpenTelemetry is not installed.
        OSError: the access log cannot be opened.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        probes = ProbeRules(
            settings.probe_interval_seconds,
            settings.probe_timeout_seconds,
            settings.probe_failures,
            settings.probe_successes,
            settings.probe_path.encode(),
        )
        self.fleet = Fleet(settings.endpoints, settings.transfer_mode, settings.breaker, probes)
        gate = Gate(settings.max_requests, settings.queue_size, settings.queue_seconds)
        decode_gate = self._decode_gate()
        self.turns: TurnStore | None = None
        if settings.turns:
            signer = Signer() if settings.client_tickets else None
            self.turns = TurnStore(settings.turn_ttl_seconds, settings.max_turns, signer)
        tracer = Tracer(settings.otlp_endpoint) if settings.otlp_endpoint is not None else None
        upstream = Upstream(
            self.fleet, settings.request_timeout_seconds, settings.engine_tls, probes, settings.patience
        )
        outstanding = Outstanding(settings.ticket_max_age_seconds)
        self.fleet.on_new_engine(outstanding.void)
        self.fleet.held = lambda instance: outstanding.count(instance.id)
        transfers = Transfers(settings.on_no_transfer)
        self.way = Way(
            self.fleet,
            upstream,
            POLICIES[settings.prefill_policy or settings.policy](),
            POLICIES[settings.decode_policy or settings.policy](),
            Metrics(
                self.fleet,
                gate,
                decode_gate=decode_gate,
                turns=self.turns,
                outstanding=outstanding,
                transfers=transfers,
            ),
            gate,
            outstanding,
            Releases(self.fleet, upstream, outstanding),
            settings.retries,
            tracer,
            transfers,
            decode_gate,
            settings.max_decode_requests or 0,
        )
        limit = settings.request_timeout_seconds
        self._deadlines = None if limit is None else Deadlines(limit)
        self._peers = Peers(settings.other_workers)
        self._engine_key = settings.engine_api_key.encode() if settings.engine_api_key else None
        self._warm_up = self._warming() if settings.warm_up else None
        self._watch = Watch(self.fleet, self.way.upstream, probes, self._look)
        first = Peers((settings.first_worker,)) if settings.first_worker is not None else None
        own = (settings.host, settings.port) if settings.uds is None else None
        self.members = Members(self.way, self._watch, self._peers, first=first, waiting=self._waiting_for, own=own)
        # Requests under way, by id: an instance that one of them has chosen is not drained yet.
        self._open: dict[bytes, Journey] = {}
        self._routes = routes(self.way, self.carried, self._peers, self.members, self._warm_up)
        # What this worker alone counts, for the others.
        self._own_routes = routes(self.way, self.carried, Peers(()), self.members, self._warm_up)
        self._own_routes[FLEET_PATH] = worker_routes(self.members)
        self._own_routes[REASONS_PATH] = reasons_route(self._warm_up)
        self._keys = Keys(settings.api_keys)
        self._admin_keys = Keys([settings.admin_key]) if settings.admin_key else self._keys
        self._origins = Origins(settings.cors_origins)
        # Request ids: random for each proxy, then counted; a random number each would cost a system call. Not made with
        # the module: workers are forked, and would share it.
        self._boot = secrets.token_hex(10).encode()
        self._numbers = itertools.count()
        self._id_headers = tuple(name.lower().encode() for name in settings.request_id_headers)
        self._beats = None if settings.keep_alive_seconds is None else Beats(settings.keep_alive_seconds)
        self._access_log = AccessLog(settings.access_log) if settings.access_log else None
        self._server = Server(self.handle, settings.limits, refusal)
        self._to_workers = Server(self._tell_worker, settings.limits, refusal)
        self._background: list[asyncio.Task[None]] = []

    async def start(self) -> list[tuple[str, int]]:
        """Listen; the bound addresses. The engines have been asked for their health once.

        Raises:
            OSError: the address cannot be had.
        """
        settings = self.settings
        if settings.instances_file is not None:
            self.members.came_from_file()
        await self.members.catch_up()
        if self.members.changed:
            # This worker was started again, and the file may have changed while it was gone.
            await self.reload()
        await self.way.upstream.probe(self.fleet)
        addresses: list[tuple[str, int]] = []
        if settings.worker_socket is not None:
            await self._to_workers.listen_unix(settings.worker_socket)
        if settings.uds is not None:
            await self._server.listen_unix(settings.uds)
        else:
            addresses = await self._server.listen(
                settings.host, settings.port, tls=settings.tls, reuse_port=settings.reuse_port
            )
        work = [self.way.upstream.sweep_forever()]
        if self._access_log is not None:
            work.append(forever(FLUSH_SECONDS, self._flush))
        if settings.scrape_seconds and settings.first_worker is None:
            # For all workers the first one does.
            work.append(forever(settings.scrape_seconds, self._scrape))
        if settings.other_workers:
            work.append(self.members.follow_forever())
        if settings.instances_file is not None and settings.first_worker is None:
            work.append(self.members.watch_file_forever(Path(settings.instances_file)))
        self._background = [asyncio.create_task(each) for each in work]
        self._watch.start()
        if self._warm_up is not None:
            self._warm_up.look()
        return addresses

    def _decode_gate(self) -> Gate | None:
        """Has as many places as the usable decode servers together; with none of them those of one, to be told so."""
        settings, fleet = self.settings, self.fleet
        each = settings.max_decode_requests
        if each is None:
            return None
        gate = Gate(each, settings.queue_size, settings.queue_seconds)
        fleet.on_change = lambda: gate.resize(each * max(sum(one.usable for one in fleet.pools[Role.DECODE]), 1))
        fleet.on_change()
        return gate

    def _warming(self) -> WarmUp | FirstWorkers:
        settings = self.settings
        if settings.first_worker is not None:
            return FirstWorkers(settings.first_worker)
        return WarmUp(self.way, self._own_headers(), settings.warm_up_seconds)

    def _own_headers(self) -> list[Header]:
        """What engines are told beside the body when the proxy itself asks."""
        nobody = Request("POST", b"/", [], http_1_0=False, keep_alive=True)
        return carried(nobody, self._engine_key, own_keys=True)

    async def stop(self, grace_seconds: float) -> None:
        """Take no more requests, finish what is open for *grace_seconds*, then cut the rest."""
        for task in self._background:
            task.cancel()
        self._watch.stop()
        self.members.close()
        if self._warm_up is not None:
            await self._warm_up.close()
        await self._server.close(grace_seconds)
        await self._to_workers.close()
        await self.way.releases.close(RELEASE_SECONDS)
        if self._deadlines is not None:
            self._deadlines.close()
        self._peers.close()
        self.way.upstream.close()
        if self._access_log is not None:
            self._access_log.close()
        if self.way.tracer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.way.tracer.close)

    def carried(self, request: Request) -> list[Header]:
        """What an engine is told of a request besides its body."""
        return carried(request, self._engine_key, bool(self._keys))

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer one request, whatever it is."""
        common: list[Header] = []
        rules = legs.RULES.get(request.path)
        try:
            if self._origins:
                common = self._origins.headers(request)
                preflight = self._origins.preflight(request)
                if preflight is not None:
                    responder.send(204, preflight, b"")
                    return
            self._let_in(request)
            if rules is not None and request.method == "POST":
                await self._generate(request, rules, responder, common)
                return
            started = time.monotonic()
            answer = await self._answer(request)
            responder.send(answer.status, [*answer.headers, *common], answer.body)
            if self._access_log is not None:
                self._access_log.line(request.method, request.path, answer.status, time.monotonic() - started)
        except Told as error:
            style = rules.style if rules is not None else Style.OPENAI
            status = tell(error, responder, [], common, style)
            if self._access_log is not None:
                self._access_log.line(request.method, request.path, status, 0.0)

    def _let_in(self, request: Request) -> None:
        """
        Raises:
            ProxyError: 401, the request lacks the key that its path asks for.
        """
        if request.path in OPEN:
            return
        keys = self._admin_keys if request.path.startswith(ADMIN) else self._keys
        if keys and not keys.know(request):
            raise ProxyError(401, "a valid API key is needed: send it as Authorization: Bearer KEY")

    async def _answer(self, request: Request) -> Answer:
        """What is not generation."""
        methods = self._routes.get(request.path)
        if methods is None and request.path.startswith(ADMIN):
            methods = instance_routes(request.path, self.way, self.members)
        if methods is None:
            if request.path not in legs.RULES:
                raise ProxyError(404, f"there is nothing at {request.path}")
            methods = {}
        make = methods.get("GET" if request.method == "HEAD" else request.method)
        if make is None:
            allowed = ", ".join(sorted(methods)) or "POST"
            raise ProxyError(405, f"{request.method} is not allowed on {request.path}", allow=allowed)
        if request.path.startswith(ADMIN) and (answer := await by_first(request, self.members)) is not None:
            return answer
        return await make(request)

    async def _tell_worker(self, request: Request, responder: Responder) -> None:
        """Answer another worker of this proxy: what this one counts, or a change of the fleet that it was asked for."""
        routes = self._own_routes.get(request.path) or instance_routes(request.path, self.way, self.members) or {}
        try:
            answer = await routes[request.method](request)
        except Told as error:
            tell(error, responder, [], [], Style.OPENAI)
        else:
            responder.send(answer.status, answer.headers, answer.body)

    async def _generate(self, request: Request, rules: Rules, responder: Responder, common: list[Header]) -> None:
        """Both phases, for every endpoint in ``legs.RULES``: from admission to the last byte, and its counts.

        This is the one place where what a request holds is given back.
        """
        way, times = self.way, Times(time.monotonic())
        journey = self._begin(request, rules, times, common)
        if way.tracer is not None:
            journey.span = way.tracer.request(request)
        status, failure = LEFT, None
        # A further attempt has another id.
        first_id = journey.request_id
        self._open[first_id] = journey
        try:
            if self._deadlines is None:
                await self._travel(journey, responder)
            else:
                await self._travel_in_time(journey, responder, self._deadlines)
            journey.state, status = State.DONE, 200
        except asyncio.CancelledError:
            way.metrics.cancelled.inc(journey.state)
            journey.state = State.CANCELLED
            raise
        except Told as error:
            failure = error
            way.metrics.failed.inc(journey.state)
            if responder.started:
                way.metrics.stream_errors.inc()
            status = tell(error, responder, journey.answer_head([]), [], rules.style)
            journey.state = State.FAILED
        finally:
            del self._open[first_id]
            journey.end_trials()
            if journey.admitted:
                way.gate.leave()
            if way.decode_gate is not None:
                journey.book(None)
                way.decode_gate.leave(journey.places)
            if journey.beat is not None:
                journey.beat.stop()
            seconds = time.monotonic() - times.arrived
            way.metrics.request(request.path, status, seconds)
            way.metrics.split(times)
            if journey.span is not None:
                journey.span.end_request(status, journey.prefill, journey.decode, failure, journey.retries)
            if self._access_log is not None:
                self._log(journey, status, seconds)

    async def _travel_in_time(self, journey: Journey, responder: Responder, deadlines: Deadlines) -> None:
        """The same within the whole time that a request may take: the line, every attempt, both legs, and the stream.

        What is over ends as if its client had left, so that nothing is left behind.

        Raises:
            ProxyError: 504, it took too long; or as :meth:`_travel`.
        """
        deadline = deadlines.start(journey.times.arrived)
        journey.due = deadline.at
        try:
            await self._travel(journey, responder)
        except asyncio.CancelledError as error:
            if not deadline.over or deadline.task.uncancel():
                raise
            raise ProxyError(504, late(journey.state)) from error
        finally:
            deadlines.stop(deadline)

    async def _travel(self, journey: Journey, responder: Responder) -> None:
        """Read, admit, and go the way that the body asks for.

        Raises:
            legs.Refused, NoInstance, ProxyError, EngineRefusal, StreamFailed: what the client is told.
        """
        way = self.way
        # read
        journey.decode_headers = decode_rank(journey.request)
        turns = self.turns
        said: dict[str, Any] | None = None if turns is None else {}
        journey.body, journey.raw = read_body(journey.request, said)
        legs.check(journey.body, journey.rules)
        made = parts(journey.body, journey.rules)
        if turns is not None and said is not None:
            journey.turn = turn_of(journey, turns, said, len(made))

        # admit: first in line for a decode server, since the line ends before prefill
        if way.decode_gate is not None and not legs.generates_nothing(journey.body, journey.rules):
            journey.places = await way.decode_gate.enter(len(made))
        if not way.gate.try_enter():
            await way.gate.enter()
        journey.admitted = True
        journey.times.admitted = time.monotonic()
        if self._beats is not None and journey.body.get("stream"):
            journey.beat = self._beats.start(responder, journey.answer_head)

        # prefill, hand off, decode
        if legs.generates_nothing(journey.body, journey.rules):
            answer = await run_prefill_alone(journey, way)
            send_whole(answer, journey, responder)
        elif len(made) > 1:
            await run_several(journey, made, way, responder)
        else:
            await run_single(journey, way, ToClient(way, responder))

    def _begin(self, request: Request, rules: Rules, times: Times, common: list[Header]) -> Journey:
        """The journey of a request whose body is still unread."""
        request_id = self._boot + b"%012x" % next(self._numbers)
        own_id = request_id
        for name in self._id_headers:
            value = request.header(name)
            if value:
                own_id = value
                break
        headers = [JSON, *self.carried(request), (b"x-request-id", request_id)]
        answer_headers = [(b"x-request-id", own_id), *common]
        return Journey(
            request, rules, {}, b"", request_id, headers, answer_headers, times, named=self.settings.name_instances
        )

    def _log(self, journey: Journey, status: int, seconds: float) -> None:
        assert self._access_log is not None
        times = journey.times
        self._access_log.line(
            journey.request.method,
            journey.request.path,
            status,
            seconds,
            request_id=journey.request_id.decode(),
            prefill=journey.prefill.id if journey.prefill is not None else "-",
            decode=journey.decode.id if journey.decode is not None else "-",
            first_event_seconds=times.first_event - times.arrived if times.first_event else 0.0,
            retries=journey.retries,
        )

    def _look(self) -> None:
        """An instance was probed: it may have come up."""
        if self._warm_up is not None:
            self._warm_up.look()

    def _waiting_for(self, instance: ProxyInstance) -> int:
        """Requests that have chosen *instance* and are not on it yet."""
        return sum(awaits(journey, instance) for journey in self._open.values())

    async def reload(self) -> None:
        """Read the file of instances again."""
        if self.settings.instances_file is not None and self.settings.first_worker is None:
            await self.members.reload(Path(self.settings.instances_file))

    async def _scrape(self) -> None:
        """Read what engines count of their transfers."""
        await self.way.transfers.scrape(self.fleet, self.way.upstream, self._own_headers())

    async def _flush(self) -> None:
        assert self._access_log is not None
        self._access_log.flush()


def send_whole(answer: Answer, journey: Journey, responder: Responder) -> None:
    """The prefill server's answer to the client, also one of events whose head a comment has sent already.

    Raises:
        ProxyError: 502, a comment has promised a stream, and it is none.
    """
    if not responder.started:
        responder.send(200, journey.answer_head(answer.headers), answer.body)
        return
    if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in answer.headers):
        raise ProxyError(502, "the prefill server answered in one piece where a stream was asked for")
    responder.write(answer.body)
    responder.end()


def awaits(journey: Journey, instance: ProxyInstance) -> bool:
    """Whether a request goes to *instance* later; one for several answers might, until it has its parts' answers."""
    if not journey.admitted or journey.state in (State.DECODING, State.STREAMING):
        return False
    return journey.decode is instance or (journey.prefill is None and journey.decode is None)


def late(state: State) -> str:
    """What the client is told of a request whose whole time was over in *state*."""
    match state:
        case State.RECEIVED | State.ADMITTED:
            return "the request took too long"
        case State.PREFILLING:
            return "the prefill server took too long"
    return "the decode server took too long"


def read_body(request: Request, said: dict[str, Any] | None = None) -> tuple[dict[str, object], bytes]:
    """The body as an object and as what an engine may get, with *said* as in :func:`baton.proxy.legs.parse`.

    Raises:
        ProxyError: 415, it is compressed.
        legs.Refused: it is no JSON object.
    """
    coding = request.header(b"content-encoding")
    if coding is not None and coding.lower() != b"identity":
        raise ProxyError(415, "a compressed body is not supported: send it as it is")
    return legs.parse(request.body, said)


def tell(error: Exception, responder: Responder, headers: list[Header], common: list[Header], style: Style) -> int:
    """Tell the client what went wrong, in the way that is still open; the status of it."""
    match error:
        case EngineRefusal(answer=answer):
            status, body, made = answer.status, answer.body, answer.headers
        case StreamFailed(body=body):
            status, made = 502, [JSON]
        case _:
            told = as_proxy_error(error)
            status, body, made = told.status, told.body(style), [JSON, *told.headers()]
    if responder.ended:
        return status
    if not responder.started:
        responder.send(status, [*made, *headers, *common], body)
        return status
    # The head is gone: an error event, and no end that looks like one.
    if not is_json(body):
        body = ProxyError(status, "the engine answered with an error").body(style)
    responder.write(error_event(body, style))
    responder.end()
    return status


def is_json(body: bytes) -> bool:
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    return True


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


async def serve(
    settings: ProxySettings,
    on_ready: Callable[[list[tuple[str, int]]], None] = lambda _: None,
    alive: Alive | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; then finish what is open and return.

    Args:
        alive: for a worker: what ends with the process that started it. Only SIGTERM stops a worker.

    Raises:
        OSError: the address cannot be listened on.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM) if alive is None else (signal.SIGTERM,)
    for number in signals:
        loop.add_signal_handler(number, stop.set)
    if alive is not None:
        watch_parent(alive, stop.set)
    proxy = Proxy(settings)
    reloads: set[asyncio.Task[None]] = set()

    def reload() -> None:
        task = loop.create_task(proxy.reload())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    if settings.instances_file is not None:
        loop.add_signal_handler(signal.SIGHUP, reload)
    settle_memory()
    try:
        on_ready(await proxy.start())
        await stop.wait()
    finally:
        stopping = asyncio.ensure_future(proxy.stop(settings.shutdown_seconds))
        for number in signals:
            # Asked a second time: cut what is still open.
            loop.add_signal_handler(number, partial(stopping.cancel))
        with contextlib.suppress(asyncio.CancelledError):
            await stopping


def serve_workers(
    settings: ProxySettings, count: int, run: Callable[[Coroutine[Any, Any, None]], None], on_ready: Callable[[], None]
) -> int:
    """Serve with *count* processes on one port until SIGINT or SIGTERM; the exit code.

    Args:
        run: runs a coroutine on a new event loop.
        on_ready: called when all of them listen.

    Raises:
        OSError: the address cannot be listened on.
    """

    def work(worker: Worker) -> None:
        own = replace(
            settings,
            port=worker.port,
            reuse_port=True,
            worker_socket=worker.socket,
            other_workers=worker.others,
            first_worker=worker.first,
            # Each lets its share in.
            max_requests=None if settings.max_requests is None else -(-settings.max_requests // count),
            max_decode_requests=None
            if settings.max_decode_requests is None
            else -(-settings.max_decode_requests // count),
            queue_size=-(-settings.queue_size // count),
        )
        run(serve(own, lambda _: worker.ready(), worker.alive))

    return Workers(count, work, passes_hangup=settings.instances_file is not None).run(
        settings.host, settings.port, lambda _: on_ready()
    )
