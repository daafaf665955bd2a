"""One request's way through the phases, as one coroutine that reads top to bottom.

States: RECEIVED, ADMITTED, PREFILLING, HANDED_OFF, DECODING, STREAMING, then DONE, FAILED or
CANCELLED. In HANDED_OFF blocks are pinned on the prefill server; the way out is DECODING, since
a decode server that has the ticket frees them, also when its request is aborted.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

import orjson

from baton.cluster import Role
from baton.http import Broken, Header, Request, Responder, Response
from baton.proxy import legs
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.metrics import Metrics
from baton.proxy.routing import Policy
from baton.proxy.ticket import TICKET_KEY, Ticket
from baton.proxy.upstream import Upstream

_TICKET_BYTES = TICKET_KEY.encode()
_NO_TICKET = b'"kv_transfer_params":null'


class State(enum.StrEnum):
    """Where a request is."""

    RECEIVED = "received"
    ADMITTED = "admitted"
    PREFILLING = "prefilling"
    HANDED_OFF = "handed_off"
    DECODING = "decoding"
    STREAMING = "streaming"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass
class Journey:
    """What is known of one request.

    Attributes:
        request: as it came.
        body: its body, parsed and checked.
        headers: what both legs carry besides the body.
        answer_headers: what the client's answer carries in any case.
        arrived: on the monotonic clock, in seconds.
        state: where it is; never goes back.
    """

    request: Request
    body: legs.Body
    request_id: bytes
    headers: list[Header]
    answer_headers: list[Header]
    arrived: float = field(default_factory=time.monotonic)
    state: State = State.RECEIVED
    prefill: ProxyInstance | None = None
    decode: ProxyInstance | None = None

    def answer_head(self, content_type: bytes) -> list[Header]:
        """Headers of an engine's answer to the client, with the instances used."""
        made = [(b"content-type", content_type), *self.answer_headers]
        if self.prefill is not None and self.decode is not None:
            made += [(b"x-baton-prefill", self.prefill.id.encode()), (b"x-baton-decode", self.decode.id.encode())]
        return made


@dataclass(frozen=True)
class Way:
    """What every journey needs of the house.

    Attributes:
        prefill_policy, decode_policy: each pool's own.
    """

    fleet: Fleet
    upstream: Upstream
    prefill_policy: Policy
    decode_policy: Policy
    metrics: Metrics


@dataclass(frozen=True)
class EngineAnswer:
    """A whole answer of an engine, to be passed on as it is."""

    status: int
    content_type: bytes
    body: bytes


def choose(journey: Journey, way: Way) -> None:
    """Pick both instances, each pool by its own policy.

    Both are known before anything is sent: a prefill without a decode server to go to would only
    pin blocks.

    Raises:
        NoInstance: a pool has none.
    """
    prefills, decodes = way.fleet.usable(Role.PREFILL), way.fleet.usable(Role.DECODE)
    journey.prefill = way.prefill_policy.pick(prefills)
    journey.decode = way.decode_policy.pick(decodes)
    journey.state = State.ADMITTED


async def prefill(journey: Journey, way: Way) -> Ticket | EngineAnswer | None:
    """Run the prefill leg.

    Returns:
        The ticket; None when the server answered without one; or its refusal, which is the client's answer.

    Raises:
        ProxyError: it broke off, took too long or cannot be reached.
    """
    instance = journey.prefill
    assert instance is not None
    journey.state = State.PREFILLING
    body = orjson.dumps(legs.prefill_leg(journey.body, legs.RULES[journey.request.path]))
    async with way.upstream.post(instance, journey.request.target, journey.headers, body) as response:
        # Read to the end, also of a refusal: only then can the connection be used again.
        answer = await read_answer(response)
    way.metrics.prefill_seconds.observe(time.monotonic() - journey.arrived)
    if answer.status != 200:
        return answer
    try:
        ticket = Ticket.from_answer(orjson.loads(answer.body), time.monotonic())
    except orjson.JSONDecodeError as error:
        raise ProxyError(502, "the prefill server's answer is not JSON") from error
    if ticket is not None:
        journey.state = State.HANDED_OFF
    return ticket


async def decode(journey: Journey, way: Way, ticket: Ticket | None, responder: Responder) -> int:
    """Run the decode leg and pass its answer on; the status that the client got.

    Raises:
        ProxyError: it broke off, took too long or cannot be reached, and nothing was sent to the client.
    """
    instance = journey.decode
    assert instance is not None
    body = legs.decode_bytes(journey.request.body, journey.body, ticket)
    async with way.upstream.post(instance, journey.request.target, journey.headers, body) as response:
        journey.state = State.DECODING
        way.metrics.first_byte_seconds.observe(time.monotonic() - journey.arrived)
        if ticket is not None and response.status == 200:
            way.metrics.handed_off.inc()
        content_type = response.header(b"content-type") or b"application/json"
        if response.status == 200 and content_type.startswith(b"text/event-stream"):
            responder.start(200, journey.answer_head(content_type))
            journey.state = State.STREAMING
            await stream(response, way, responder)
        else:
            answer = await read_answer(response)
            whole = without_ticket(answer.body) if answer.status == 200 else answer.body
            responder.send(answer.status, journey.answer_head(content_type), whole)
        return response.status


async def read_answer(response: Response) -> EngineAnswer:
    """An engine's answer, whole."""
    return EngineAnswer(response.status, response.header(b"content-type") or b"application/json", await response.read())


async def stream(response: Response, way: Way, responder: Responder) -> None:
    """Pass the stream on as it comes, in callbacks; a slow client holds the engine back.

    One that breaks ends with an error event and no [DONE].
    """
    responder.on_pause, responder.on_resume = response.pause, response.resume
    if responder.paused:
        response.pause()
    try:
        await response.feed(responder.write)
    except Broken:
        way.metrics.stream_errors.inc()
        broken = ProxyError(502, "the decode server broke off its answer")
        # A line may be half out: the blank line ends it, so that the event stands alone.
        responder.write(b"\n\n" + broken.event())
    responder.end()


def without_ticket(body: bytes) -> bytes:
    """An answer for the client: a ticket in it would name hosts and blocks."""
    if _TICKET_BYTES not in body or _NO_TICKET in body:
        return body
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProxyError(502, "the decode server's answer is not JSON") from error
    if not isinstance(answer, dict) or answer.get(TICKET_KEY) is None:
        return body
    del answer[TICKET_KEY]
    return orjson.dumps(answer)
