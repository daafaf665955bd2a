"""Talking to engines: a pool for each, and what goes wrong turned into answers."""

from __future__ import annotations

import asyncio
import enum
import logging
import ssl
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from baton.cluster import Role
from baton.http import (
    Broken,
    Buffer,
    ClientError,
    ConnectFailed,
    Exchange,
    Header,
    Late,
    Origin,
    OutOfDescriptors,
    Pool,
    Response,
    Timeouts,
    TooLate,
    TooSlow,
)
from baton.proxy import engine_info
from baton.proxy.breaker import USUAL_PROBES, ProbeRules
from baton.proxy.engine_info import BadEngineInfo, EngineInfo
from baton.proxy.errors import JSON, ProxyError, StreamFailed
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.forever import forever
from baton.proxy.tracing import Span

logger = logging.getLogger("baton.proxy")

SWEEP_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""For how long a leg on an engine that answers no probe is waited for, when there is no other engine or the client has
a part of the answer: it may only stand still for a while."""
_TYPE = b"content-type"
# What an engine's answer says to the client besides its body; framing is our own.
_PASSED = frozenset((b"retry-after", b"www-authenticate"))
_PASSED_FAMILY = b"x-ratelimit-"
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


@dataclass(frozen=True)
class Patience:
    """How long a leg may be without a word from its engine, in seconds; infinite for ever.

    The one word of an answer in one piece is its end. A stream says something with every token.

    Attributes:
        prefill: in line at a prefill server, and while it computes the prompt.
        decode: in line at a decode server, while it waits for the KV cache, and between two pieces of its answer.
    """

    prefill: float = 600.0
    decode: float = 1800.0

    def of(self, role: Role) -> float:
        return self.prefill if role is Role.PREFILL else self.decode


USUAL_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, of an engine or our own.

    Attributes:
        headers: an engine's that the client gets too; our own.
        body: without any content coding.
    """

    status: int
    headers: list[Header]
    body: bytes


def passed_headers(response: Response) -> list[Header]:
    """The headers of an engine's answer that are the client's too; with a content type in any case."""
    made, typed = [], False
    for pair in response.headers:
        name = pair[0]
        if name == _TYPE:
            typed = True
            made.append(pair)
        elif name in _PASSED or name.startswith(_PASSED_FAMILY):
            made.append(pair)
    return made if typed else [JSON, *made]


def decoder(response: Response) -> Callable[[bytes], bytes] | None:
    """What undoes the content coding of an answer, piece by piece; None when there is none.

    Nobody asks engines for one, but whoever stands between may add it, and what is put right must be readable.

    Raises:
        ProxyError: 502, it is one that nobody knows.
    """
    coding = response.header(b"content-encoding")
    if coding is None or coding.lower() == b"identity":
        return None
    bits = _WINDOW_BITS.get(coding.lower())
    if bits is None:
        raise ProxyError(502, "the engine's answer is compressed in a way that was not asked for")
    return zlib.decompressobj(bits).decompress


async def read_answer(response: Response) -> Answer:
    """An engine's answer, whole.

    Raises:
        Broken: it ended early.
        ProxyError: 502, its content coding is unknown or wrong.
    """
    return Answer(response.status, passed_headers(response), await read_body(response))


async def read_body(response: Response) -> bytes:
    """Its body alone, without any content coding.

    Raises:
        Broken, ProxyError: as :func:`read_answer`.
    """
    body, decode = await response.read(), decoder(response)
    return body if decode is None else _undone(decode, body)


def plain(response: Response, raw: bytes) -> bytes:
    """The whole body *raw* of an answer, without any content coding.

    Raises:
        ProxyError: as :func:`read_answer`.
    """
    decode = decoder(response)
    return raw if decode is None else _undone(decode, raw)


def _undone(decode: Callable[[bytes], bytes], raw: bytes) -> bytes:
    try:
        return decode(raw)
    except zlib.error as error:
        raise ProxyError(502, "the engine's answer is not compressed as it says") from error


class Outcome(enum.Enum):
    """What the end of a leg says of its instance."""

    GOOD = "good"
    BAD = "bad"
    NEITHER = "neither"


def outcome(status: int, error: BaseException | None) -> Outcome:
    """What a leg says of its instance.

    A 4xx is the client's fault, and so is a client that left; a 501 says that the engine has no such thing.

    Args:
        status: of the answer; 0 when there was none.
        error: what ended the leg; None when it was read to its end.
    """
    match error:
        case OutOfDescriptors():
            return Outcome.NEITHER
        case ConnectFailed() | Broken() | TooSlow() | StreamFailed():
            return Outcome.BAD
    if status >= 500:
        return Outcome.NEITHER if status == 501 else Outcome.BAD
    if status >= 400:
        return Outcome.NEITHER
    if error is None:
        return Outcome.GOOD
    return Outcome.BAD if isinstance(error, ProxyError) and error.status == 502 else Outcome.NEITHER


class Leg:
    """One leg of a request: counts itself on its instance, and turns what goes wrong into answers.

    The one place where both the count and the connection are released, and where the instance's breaker hears how the
    leg ended. A class and not a generator: it is entered twice for every request.
    """

    __slots__ = ("_exchange", "_instance", "_span", "_status")

    def __init__(self, instance: ProxyInstance, exchange: Exchange, span: Span | None) -> None:
        self._instance = instance
        self._exchange = exchange
        self._span = span
        self._status = 0

    def linger(self, seconds: float) -> None:
        """From now on, see *linger_seconds* of :meth:`Upstream.post`."""
        self._exchange.linger_seconds = seconds

    def hear_late(self, seconds: float, late: Late) -> None:
        """Before it is entered: *late* gets an answer that comes within *seconds* after it was left."""
        self._exchange.late_seconds, self._exchange.late = seconds, late

    def send_by(self, moment: float) -> None:
        """Before it is entered: not to be sent after this moment on the monotonic clock."""
        self._exchange.send_by = moment

    @property
    def sent(self) -> bool:
        """Whether the instance can have got any of it."""
        return self._exchange.sent

    async def deliver(self) -> None:
        """In place of entering it: see :meth:`baton.http.Exchange.deliver`."""
        try:
            await self._exchange.deliver()
        except ClientError as error:
            self._explain(error)
            raise

    async def __aenter__(self) -> Response:
        self._instance.in_flight += 1
        try:
            response = await self._exchange.__aenter__()
            self._status = response.status
            return response
        except BaseException as error:
            self._instance.in_flight -= 1
            self._judge(error)
            if self._span is not None:
                self._span.end(error)
            self._explain(error)
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        self._instance.in_flight -= 1
        self._exchange.leave()
        if error is not None or self._status != 200 or self._instance.breaker.failures:
            self._judge(error)
        if self._span is not None:
            self._span.end(error)
        if error is not None:
            self._explain(error)

    def _judge(self, error: BaseException | None) -> None:
        """Tell the instance how the leg ended."""
        instance = self._instance
        match outcome(self._status, error):
            case Outcome.BAD if isinstance(error, ConnectFailed):
                instance.unreachable(str(error))
            case Outcome.BAD:
                answered = f"a request was answered {self._status}"
                instance.leg_bad(answered if self._status >= 500 else f"a request failed: {error}")
            case Outcome.NEITHER:
                instance.leg_neither()
            case Outcome.GOOD if instance.breaker.failures:
                instance.leg_good()

    def _explain(self, error: BaseException) -> None:
        """Raise the answer for *error*, when there is one."""
        role = self._instance.endpoint.role
        match error:
            case OutOfDescriptors():
                raise ProxyError(503, "the proxy has no file descriptors left: try again", retry_after=1) from error
            case ConnectFailed():
                raise ProxyError(503, f"the {role} server cannot be reached", retry_after=1, retry=True) from error
            case TooLate():
                raise ProxyError(
                    503, f"the {role} server was not reached in time", retry_after=1, retry=True
                ) from error
            case TooSlow():
                raise ProxyError(504, f"the {role} server took too long", retry=True) from error
            case Broken():
                raise ProxyError(502, f"the {role} server broke off its answer", retry=True) from error


class AsideLeg(Leg):
    """A leg of no generation. Whether an engine can generate its answer does not say, and neither does its failure: it
    tells only that nobody is there, and is no trial of a breaker that is half-open, nor the end of one."""

    __slots__ = ()

    def _judge(self, error: BaseException | None) -> None:
        if isinstance(error, ConnectFailed) and not isinstance(error, OutOfDescriptors):
            self._instance.unreachable(str(error))


class Upstream:
    """Connections to every engine of a fleet, made when they are first needed.

    Args:
        fleet: whose instances they are.
        timeout_seconds: for one leg from start to end; None waits as long as the client does.
        tls: for those that are reached by https; None has Python's own rules for it.
        probes: how an engine is asked for its health.
        patience: with engines that say nothing.
    """

    def __init__(
        self,
        fleet: Fleet,
        timeout_seconds: float | None = None,
        tls: ssl.SSLContext | None = None,
        probes: ProbeRules = USUAL_PROBES,
        patience: Patience = USUAL_PATIENCE,
    ) -> None:
        self._fleet = fleet
        self._patience = patience
        self._times = Timeouts(total=timeout_seconds)
        self._tls = tls
        self._probes = probes
        self._pools: dict[str, Pool] = {}
        self._instances: dict[str, ProxyInstance] = {}
        self._closed = False
        for instance in fleet:
            self._open(instance)

    def _open(self, instance: ProxyInstance) -> Pool:
        """A pool for an instance that has none: it is new, or was removed and somebody has chosen it before."""
        at = instance.endpoint
        if at.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        pool = Pool(Origin(at.host, at.port, self._tls if at.tls else None), self._times)
        if self._closed:
            pool.close()
        self._pools[instance.id], self._instances[instance.id] = pool, instance
        return pool

    def _pool(self, instance: ProxyInstance) -> Pool:
        return self._pools.get(instance.id) or self._open(instance)

    def post(
        self,
        instance: ProxyInstance,
        path: bytes,
        headers: Iterable[Header],
        body: Sequence[Buffer],
        span: Span | None = None,
        *,
        linger_seconds: float = 0.0,
        aside: bool = False,
    ) -> Leg:
        """One leg, to be entered with ``async with``: gives the engine's response once its head is in.

        Leaving it before the body is read closes the connection, which aborts the request on the engine. While it
        is open the instance counts one request more. Entering and the block itself raise:
            ProxyError: 503 the engine cannot be reached, 502 it broke off, 504 it took too long.

        Args:
            linger_seconds: see :meth:`baton.http.Pool.request`.
            aside: whether it is one that generates nothing (:class:`AsideLeg`).
        """
        pool = self._pools.get(instance.id) or self._open(instance)
        exchange = pool.request(b"POST", path, headers, body, linger_seconds=linger_seconds)
        return (AsideLeg if aside else Leg)(instance, exchange, span)

    def get(self, instance: ProxyInstance, path: bytes, headers: Iterable[Header]) -> Leg:
        """The same for a GET, which generates nothing."""
        return AsideLeg(instance, self._pool(instance).request(b"GET", path, headers), None)

    def _question(self, instance: ProxyInstance, path: bytes) -> Exchange:
        """One of the proxy's own, that shows whether an engine is there: no silence of the engine's cuts it short."""
        exchange = self._pool(instance).request(b"GET", path, ())
        exchange.patient = True
        return exchange

    async def probe(self, fleet: Fleet) -> None:
        """Ask every instance for its health, all at once."""
        await asyncio.gather(*(self.probe_one(instance) for instance in fleet))

    async def probe_one(self, instance: ProxyInstance) -> None:
        """Ask one instance for its health; and what it is, when it can say so, since another may have come up there."""
        path = self._probes.path
        said = path.decode()
        try:
            async with asyncio.timeout(self._probes.timeout_seconds), self._question(instance, path) as response:
                await response.read()
            healthy = response.status == 200
            if healthy and (instance.tells or not instance.learned):
                await self._learn(instance)
            instance.probed(healthy, f"{said} answered {response.status}")
        except OutOfDescriptors:
            # That says nothing of the engine.
            logger.warning("no file descriptor left to ask %s for its health", instance.id)
        except ConnectFailed as error:
            instance.probed(False, f"{said} failed: {error}", certain=True)
        except (ClientError, TimeoutError) as error:
            silent = isinstance(error, TimeoutError)
            instance.probed(False, f"{said} failed: {str(error) or 'too slow'}", silent=silent)

    async def _learn(self, instance: ProxyInstance) -> None:
        """Ask an instance what it is. One that doesn't know the question is a stock engine: its tickets say it.

        Raises:
            ClientError, TimeoutError: there was no answer.
        """
        seconds = self._probes.timeout_seconds
        async with asyncio.timeout(seconds), self._question(instance, engine_info.PATH) as response:
            raw = await response.read()
        learned, instance.learned = instance.learned, response.status < 500
        if response.status != 200:
            if instance.tells and response.status < 500:
                # Another engine is there, which doesn't know the question.
                instance.tells = False
                instance.doubt()
                instance.learned = True
            return
        try:
            info = EngineInfo.parse(raw)
        except BadEngineInfo as error:
            if not learned:
                logger.warning("%s does not say what it is, and is taken for a stock engine: %s", instance.id, error)
            return
        instance.tells = True
        if learned and (info == instance.info or (info is not None and knows(instance, info))):
            return
        role = instance.endpoint.role
        if info is not None and info.misplaced(role):
            logger.warning("%s is named as a %s server and was started as a %s", instance.id, role, info.kv_role)
        instance.set_info(info)

    async def sweep_forever(self) -> None:
        """Close connections that were idle for too long, and give up legs that wait for too long, once a second."""
        await forever(SWEEP_SECONDS, self._sweep)

    async def _sweep(self) -> None:
        for name, pool in list(self._pools.items()):
            pool.sweep()
            instance = self._instances[name]
            pool.hush(*self._silence(instance))
            if instance.removed and not pool.size and not instance.in_flight:
                pool.close()
                del self._pools[name], self._instances[name]

    def _silence(self, instance: ProxyInstance) -> tuple[float, float]:
        """Seconds without a word after which a leg on *instance* is given up: before its first byte, and after it.

        One that was taken out since it answers no probe would let its legs wait for ever. Another, if there is one, is
        asked at once; nothing of the answer is lost by that.
        """
        usual = self._patience.of(instance.endpoint.role)
        if instance.up or not instance.silent:
            return usual, usual
        later = min(usual, SILENT_SECONDS)
        others = any(each.usable for each in self._fleet.pools[instance.endpoint.role])
        return (0.0 if others else later), later

    def close(self) -> None:
        self._closed = True
        for pool in self._pools.values():
            pool.close()


def knows(instance: ProxyInstance, info: EngineInfo) -> bool:
    """Whether it is known that this engine is there; perhaps as the one rank of it that can be reached."""
    return instance.info is not None and instance.info.names(info.engine_id)
