"""One request's way through the phases, as one coroutine that reads top to bottom.

States: RECEIVED, ADMITTED, PREFILLING, HANDED_OFF, DECODING, STREAMING, then DONE, FAILED or
CANCELLED. In HANDED_OFF blocks are pinned on the prefill server; the way out is DECODING, since
a decode server that has the ticket frees them, also when its request is aborted.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import orjson

from baton.cluster import Role
from baton.proxy import legs
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.metrics import Metrics
from baton.proxy.routing import Policy
from baton.proxy.ticket import TICKET_KEY, Ticket
from baton.proxy.upstream import Upstream


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


class Reply(Protocol):
    """The way back to the client. The head is sent once, and only when it is known."""

    async def whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer in one piece."""

    async def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a stream."""

    async def chunk(self, data: bytes) -> None:
        """Pass a piece of the stream on, waiting while the client is slow."""


@dataclass
class Journey:
    """What is known of one request.

    Attributes:
        path: the endpoint.
        body: the client's body, parsed and checked.
        request_id: ours; on both legs.
        headers: what both legs carry besides.
        arrived: on the monotonic clock, in seconds.
        state: where it is; never goes back.
    """

    path: str
    body: legs.Body
    request_id: str
    headers: Mapping[str, str]
    arrived: float = field(default_factory=time.monotonic)
    state: State = State.RECEIVED
    prefill: ProxyInstance | None = None
    decode: ProxyInstance | None = None

    def served_by(self) -> dict[str, str]:
        """Headers that name the instances used."""
        names = {"x-baton-prefill": self.prefill, "x-baton-decode": self.decode}
        return {name: instance.id for name, instance in names.items() if instance is not None}


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


RunMode = Callable[[Journey, Way, Reply], Awaitable[int]]


async def prefill(journey: Journey, way: Way) -> Ticket | tuple[int, str, bytes] | None:
    """Run the prefill leg.

    Returns:
        The ticket; None when the server answered without one; or its refusal as status, content
        type and body, which is the client's answer.
    """
    instance = journey.prefill
    assert instance is not None
    journey.state = State.PREFILLING
    with instance.busy():
        async with way.upstream.post(
            instance, journey.path, legs.prefill_leg(journey.body), journey.headers
        ) as response:
            # Read to the end, also of a refusal: only then can the connection be used again.
            body = await response.read()
            status, kind = response.status, response.headers.get("Content-Type", "application/json")
    way.metrics.prefill_seconds.observe(time.monotonic() - journey.arrived)
    if status != 200:
        return status, kind, body
    try:
        ticket = Ticket.from_answer(orjson.loads(body), time.monotonic())
    except orjson.JSONDecodeError as error:
        raise ProxyError(502, "the prefill server's answer is not JSON") from error
    if ticket is not None:
        journey.state = State.HANDED_OFF
    return ticket


async def decode(journey: Journey, way: Way, ticket: Ticket | None, reply: Reply) -> int:
    """Run the decode leg and pass its answer on; the status that the client got."""
    instance = journey.decode
    assert instance is not None
    with instance.busy():
        async with way.upstream.post(
            instance, journey.path, legs.decode_leg(journey.body, ticket), journey.headers
        ) as response:
            journey.state = State.DECODING
            way.metrics.first_byte_seconds.observe(time.monotonic() - journey.arrived)
            if ticket is not None and response.status == 200:
                way.metrics.handed_off.inc()
            head = {"Content-Type": response.headers.get("Content-Type", "application/json")}
            head |= journey.served_by()
            if response.status == 200 and response.content_type == "text/event-stream":
                await reply.head(200, head)
                journey.state = State.STREAMING
                await _stream(response, way, reply)
            else:
                body = await response.read()
                await reply.whole(response.status, head, without_ticket(body) if response.status == 200 else body)
            return response.status


async def _stream(response: aiohttp.ClientResponse, way: Way, reply: Reply) -> None:
    """Pass the stream on as it comes. One that breaks ends with an error event and no [DONE]."""
    try:
        async for data in response.content.iter_any():
            await reply.chunk(data)
    except (aiohttp.ClientError, TimeoutError) as error:
        way.metrics.stream_errors.inc()
        broken = ProxyError(502, f"the decode server broke off its answer ({type(error).__name__})")
        # A line may be half out: the blank line ends it, so that the event stands alone.
        await reply.chunk(b"\n\n" + broken.event())


def without_ticket(body: bytes) -> bytes:
    """An answer for the client: a ticket in it would name hosts and blocks."""
    if TICKET_KEY.encode() not in body:
        return body
    try:
        answer: Any = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ProxyError(502, "the decode server's answer is not JSON") from error
    if not isinstance(answer, dict) or answer.get(TICKET_KEY) is None:
        return body
    del answer[TICKET_KEY]
    return orjson.dumps(answer)


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
