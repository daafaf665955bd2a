"""One request's way through the phases: its states, and the steps that a transfer mode puts in order.

States: RECEIVED, ADMITTED, PREFILLING, HANDED_OFF, DECODING, STREAMING, then DONE, FAILED or
CANCELLED. In HANDED_OFF blocks are pinned on the prefill server; the way out is DECODING, since
a decode server that has the ticket frees them, also when its request is aborted; for a ticket that none has got
`release.py` finds one. In write mode the decode leg is under way from PREFILLING on. Before STREAMING a failure may
take a request back to ADMITTED, to be tried again with other instances (`modes/failover.py`).
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from baton.cluster import Role
from baton.hand_over import ASK
from baton.http import Broken, Buffer, ConnectFailed, Header, Request, Response, TooLate, TooSlow
from baton.proxy import legs
from baton.proxy.admission import Gate
from baton.proxy.answers import Correction, Prefilled, is_broken, says_failed, suspicious
from baton.proxy.attempts import OF_THE_TRANSFER, Attempts, Cause, Retries, cause_of_status
from baton.proxy.beat import Beat
from baton.proxy.breaker import Trial
from baton.proxy.door import check_rank
from baton.proxy.errors import Fault, ProxyError, StreamFailed
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.legs import Style
from baton.proxy.metrics import Metrics
from baton.proxy.outstanding import Outstanding
from baton.proxy.release import LATE_SECONDS, LINGER_SECONDS, Errand, Releases
from baton.proxy.routing import Policy
from baton.proxy.samples import Part
from baton.proxy.ticket import Ticket
from baton.proxy.tracing import Span, Tracer
from baton.proxy.transfers import Transfers
from baton.proxy.turns import Turn
from baton.proxy.upstream import Answer, Leg, Upstream, read_answer, read_body

logger = logging.getLogger("baton.proxy")


NO_RETRIES = Retries(most=0)
Sent = tuple[ProxyInstance, list[Header], bytes]
"""A prefill leg that went out: to whom, with which headers, and the request's body as it was then."""
# What a leg says went wrong, by the exception behind it.
_CAUSES: Sequence[tuple[type[Exception], Cause]] = (
    (ConnectFailed, Cause.CONNECT),
    (TooLate, Cause.STALE),
    (TooSlow, Cause.TOO_SLOW),
    (Broken, Cause.BROKE),
)


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


@dataclass(slots=True)
class Times:
    """When a request passed each mark, on the monotonic clock in seconds; 0 while it has not.

    Attributes:
        arrived: its last byte was here.
        admitted: it was let through the gate.
        prefill_sent, prefilled: the prefill leg, from its dispatch to the whole answer.
        decode_sent, decode_head: the decode leg, from its dispatch to the head of the answer; in write mode it is sent
            with the prefill leg, and the head may come before *prefilled*.
        first_event: the first event of a stream passed.
    """

    arrived: float
    admitted: float = 0.0
    prefill_sent: float = 0.0
    prefilled: float = 0.0
    decode_sent: float = 0.0
    decode_head: float = 0.0
    first_event: float = 0.0


@dataclass(slots=True)
class Journey:
    """What is known of one request.

    Attributes:
        request: as it came.
        rules: of its endpoint.
        body: its body, parsed and checked.
        raw: the same in bytes, as an engine may get it.
        request_id: the proxy's own, on both legs.
        headers: what both legs carry besides the body.
        answer_headers: what the client's answer carries in any case.
        decode_headers: what the decode leg alone carries.
        times: when it passed each mark.
        state: where it is.
        prefill, decode: the instances, once they are chosen.
        on_prefilled: called when the prefill leg is answered, or when there is none (``--on-no-transfer fallback``).
        span: of the whole request.
        beat: what speaks while its stream is silent.
        named: whether the answer says which instances made it.
        admitted: it holds a place behind the gate.
        places: that it holds at decode servers, of any of them.
        booked: the decode server that it counts on, when their places are counted.
        turn: its conversation's; None when turns are off or it has none.
        due: when its whole time is over, on the monotonic clock.
        attempts: what failed it; None while nothing has.
        retries: attempts after the first, those of its parts included.
        ticket: of this attempt, once the prefill server has given it.
        trials: that it is of what is half-open, and that are given up with it unless they came to an end.
        heard: whether the client has got a part of the answer: from then on nothing can be tried again.
    """

    request: Request
    rules: legs.Rules
    body: legs.Body
    raw: bytes
    request_id: bytes
    headers: list[Header]
    answer_headers: list[Header]
    times: Times
    decode_headers: Sequence[Header] = ()
    state: State = State.RECEIVED
    prefill: ProxyInstance | None = None
    decode: ProxyInstance | None = None
    on_prefilled: Callable[[], None] | None = None
    span: Span | None = None
    beat: Beat | None = None
    named: bool = True
    admitted: bool = False
    places: int = 0
    booked: ProxyInstance | None = None
    turn: Turn | None = None
    due: float = math.inf
    attempts: Attempts | None = None
    retries: int = 0
    ticket: Ticket | None = None
    trials: Sequence[Trial] = ()
    heard: bool = False

    def part(self, part: Part) -> Journey:
        """The journey of one part of it, with an id of its own."""
        request_id = b"%b-%d" % (self.request_id, part.index)
        headers = [(name, request_id if name == b"x-request-id" else value) for name, value in self.headers]
        raw = legs.written(part.body)
        return Journey(
            self.request,
            self.rules,
            part.body,
            raw,
            request_id,
            headers,
            [],
            self.times,
            self.decode_headers,
            span=self.span,
            due=self.due,
        )

    def renamed(self, request_id: bytes) -> None:
        """Both legs carry *request_id* from now on: no engine may take one attempt for another."""
        self.request_id = request_id
        self.headers = [(name, request_id if name == b"x-request-id" else value) for name, value in self.headers]

    def answer_head(self, engines: list[Header]) -> list[Header]:
        """Headers of an engine's answer to the client, with the instances used."""
        made = [*engines, *self.answer_headers]
        if not self.named:
            return made
        if self.prefill is not None:
            made.append(self.prefill.named)
        if self.decode is not None:
            made.append(self.decode.named)
        return made

    def book(self, decode: ProxyInstance | None) -> None:
        """It counts on *decode* from now on, and no longer on another."""
        if self.booked is not None:
            self.booked.booked -= 1
        self.booked = decode
        if decode is not None:
            decode.booked += 1

    def on_trial(self, instance: ProxyInstance) -> None:
        """*instance* was chosen for it: while that is not usable, it is its trial."""
        if not instance.usable:
            self.trials = [*self.trials, *instance.try_now()]

    def end_trials(self) -> None:
        """It is no trial any more: of those that its legs did not end, since they were never sent, others may be."""
        for breaker, since in self.trials:
            breaker.give_up(since)
        self.trials = ()


@dataclass(frozen=True)
class Way:
    """What every journey needs of the house.

    Attributes:
        prefill_policy, decode_policy: each pool's own.
        gate: admits requests.
        decode_gate: gives them places at decode servers before their prefill; None when these have no limit.
        decode_places: how many each of them has.
        outstanding: the tickets that are out.
        releases: what frees those that nobody will use.
        retries: how often a request is tried again.
        tracer: None when nobody wants spans.
        transfers: what became of the hand-offs, and what is done about those that were none.
    """

    fleet: Fleet
    upstream: Upstream
    prefill_policy: Policy
    decode_policy: Policy
    metrics: Metrics
    gate: Gate
    outstanding: Outstanding
    releases: Releases
    retries: Retries = NO_RETRIES
    tracer: Tracer | None = None
    transfers: Transfers = field(default_factory=Transfers)
    decode_gate: Gate | None = None
    decode_places: int = 0


class EngineRefusal(Fault):
    """An engine answered with an error, which is the client's answer as it is."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(f"the engine answered {answer.status}")
        self.answer = answer


Deliver = Callable[[Journey, Response, Correction], Awaitable[None]]
"""Takes the decode server's answer, whose head is in and says 200, to where it belongs."""


def choose(journey: Journey, way: Way) -> None:
    """Pick both instances, each pool by its own policy.

    Both are known before anything is sent: a prefill without a decode server to go to would only
    pin blocks. A part of a request comes with its prefill server chosen, when another has computed its prompt.

    Raises:
        NoInstance: a pool has none.
        ProxyError: 400, the decode server has no such rank as the client names.
    """
    prefills, decodes = way.fleet.usable(Role.PREFILL), way.fleet.usable(Role.DECODE)
    if journey.attempts is not None:
        prefills, decodes = (untried(usable, journey.attempts.failed) or usable for usable in (prefills, decodes))
    if way.decode_places:
        decodes = [each for each in decodes if each.booked < way.decode_places] or decodes
    if journey.prefill is None or journey.prefill not in prefills:
        journey.prefill = way.prefill_policy.pick(prefills)
    if journey.decode is None or journey.decode not in decodes:
        journey.decode = way.decode_policy.pick(decodes)
    if way.fleet.pairs.bad and not way.fleet.may_pair(journey.prefill, journey.decode):
        fitting = [each for each in decodes if way.fleet.may_pair(journey.prefill, each)]
        if fitting:
            journey.decode = way.decode_policy.pick(fitting)
        elif others := [each for each in prefills if way.fleet.may_pair(each, journey.decode)]:
            journey.prefill = way.prefill_policy.pick(others)
    if way.decode_places:
        journey.book(journey.decode)
    if journey.decode_headers:
        check_rank(journey.decode_headers, journey.decode.ranks)
    if not (journey.prefill.usable and journey.decode.usable):
        journey.on_trial(journey.prefill)
        journey.on_trial(journey.decode)
    if way.fleet.pairs.bad:
        journey.trials = [*journey.trials, *way.fleet.pair_chosen(journey.prefill, journey.decode)]
    journey.state = State.ADMITTED


def choose_prefill(journey: Journey, way: Way) -> ProxyInstance:
    """Pick a prefill server alone, for a request that nobody decodes.

    Raises:
        NoInstance: there is none.
    """
    usable = way.fleet.usable(Role.PREFILL)
    if journey.attempts is not None:
        usable = untried(usable, journey.attempts.failed) or usable
    journey.prefill = chosen = way.prefill_policy.pick(usable)
    journey.on_trial(chosen)
    return chosen


def untried(usable: Sequence[ProxyInstance], failed: Container[str]) -> Sequence[ProxyInstance]:
    """Those that have not *failed* a request, by id."""
    return [each for each in usable if each.id not in failed]


def open_leg(
    journey: Journey,
    way: Way,
    instance: ProxyInstance,
    body: Sequence[Buffer],
    linger_seconds: float = 0.0,
    *,
    added: Sequence[Header] = (),
) -> Leg:
    """One leg on *instance*, to be entered, with headers *added*; with a span of its own when somebody traces."""
    headers, span = [*journey.headers, *added] if added else journey.headers, None
    if way.tracer is not None:
        span, headers = way.tracer.leg(journey.span, instance, headers)
    return way.upstream.post(instance, journey.request.target, headers, body, span, linger_seconds=linger_seconds)


async def prefill(journey: Journey, way: Way, ask: Mapping[str, Any] = ASK, added: Sequence[Header] = ()) -> Prefilled:
    """Run the prefill leg.

    Args:
        ask: what it carries in a ticket's place.
        added: headers.

    Raises:
        EngineRefusal: the server answered with an error.
        ProxyError: it broke off, failed, took too long or cannot be reached.
    """
    instance, times = journey.prefill, journey.times
    assert instance is not None
    journey.state = State.PREFILLING
    body = legs.written(legs.prefill_leg(journey.body, journey.rules, ask))
    if not times.prefill_sent:
        # Whatever failed before it is a part of the prefill leg too.
        times.prefill_sent = time.monotonic()
    leg = open_leg(journey, way, instance, (body,), added=added)
    leg.hear_late(LATE_SECONDS, partial(came_late, journey, way, (instance, journey.headers, journey.raw)))
    try:
        async with leg as response:
            # Read to the end, also of a refusal: only then can the connection be used again.
            if response.status != 200:
                raise EngineRefusal(await read_answer(response))
            raw = await read_body(response)
        times.prefilled = time.monotonic()
        try:
            value = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ProxyError(502, "the prefill server's answer is not JSON", retry=True) from error
        ticket = Ticket.from_answer(value, times.prefilled)
        if (suspicious(raw) and says_failed(value)) or (journey.rules.style is Style.RESPONSES and is_broken(value)):
            if ticket is not None:
                way.releases.unwanted(ticket, errand_for(journey, (instance, journey.headers, journey.raw)))
            raise ProxyError(502, "the prefill server failed while it computed the prompt", retry=True)
    except Fault as fault:
        fault.at = Role.PREFILL
        raise
    journey.ticket = ticket
    if ticket is not None:
        journey.state = State.HANDED_OFF
        instance.hear(ticket.params)
        way.outstanding.give(ticket, instance)
    if journey.on_prefilled is not None:
        journey.on_prefilled()
    return Prefilled(ticket, value if isinstance(value, dict) else {})


async def decode(journey: Journey, way: Way, prefilled: Prefilled, deliver: Deliver) -> None:
    """Run the decode leg and deliver its answer.

    Raises:
        EngineRefusal: the server answered with an error.
        ProxyError: it broke off, failed, took too long or cannot be reached.
    """
    ticket = prefilled.ticket
    leg, scored = decode_leg(journey, way, ticket, LINGER_SECONDS if ticket is not None else 0.0)
    if ticket is not None:
        assert journey.prefill is not None
        leg.send_by(way.outstanding.usable_until(ticket, journey.prefill))
    try:
        async with leg as response:
            journey.state = State.DECODING
            journey.times.decode_head = time.monotonic()
            if response.status != 200:
                raise EngineRefusal(await read_answer(response))
            if ticket is not None:
                way.metrics.handed_off.inc()
            await deliver(journey, response, Correction(journey.rules, journey.body, prefilled, scored, journey.turn))
    except BaseException as error:
        settle(journey, way, ticket, leg, error)
        raise
    if ticket is not None:
        worked(journey, way, ticket)


def worked(journey: Journey, way: Way, ticket: Ticket) -> None:
    """The decode leg has ended well: its ticket was used."""
    assert journey.prefill is not None and journey.decode is not None
    way.outstanding.use(ticket)
    way.fleet.pair_worked(journey.prefill, journey.decode)


def settle(journey: Journey, way: Way, ticket: Ticket | None, leg: Leg, error: BaseException) -> None:
    """The decode leg has ended with *error*: see to its ticket, and to who is to blame.

    A ticket that a decode server can have seen is never used again: its blocks may be somebody else's by then. Who was
    left has noticed that, and tells the prefill server. Who failed may have told it, or may not (it died, something
    before it answered in its place, or vLLM does not at some endpoints): it is told to free the blocks.
    """
    if isinstance(error, Fault):
        error.at = Role.DECODE
    if ticket is None:
        return
    assert journey.prefill is not None and journey.decode is not None
    errand = errand_for(journey, (journey.prefill, journey.headers, journey.raw))
    if not leg.sent:
        way.releases.start(ticket, errand, but=journey.decode if cause_of(error) is Cause.CONNECT else None)
        return
    if journey.heard or not isinstance(error, Fault):
        way.outstanding.drop(ticket)
        return
    way.releases.revoke(ticket, errand)
    if cause_of(error) in OF_THE_TRANSFER:
        way.fleet.pair_failed(journey.prefill, journey.decode, str(error))
        way.transfers.suspect_pairs.add((journey.prefill.id, journey.decode.id))


def cause_of(error: BaseException) -> Cause | None:
    """Why an attempt failed, when another may do better; None when it is the client's mistake, or no engine's."""
    match error:
        case EngineRefusal(answer=answer):
            return cause_of_status(answer.status)
        case StreamFailed():
            return cause_of_status(error.code)
        case ProxyError(retry=True):
            behind = error.__cause__
            return next((cause for kind, cause in _CAUSES if isinstance(behind, kind)), Cause.SERVER_ERROR)
    return None


def came_late(journey: Journey, way: Way, sent: Sent, response: Response, answer: bytes) -> None:
    """A prefill leg that was given up is answered: have the server's blocks freed, if it holds some."""
    way.releases.came_late(errand_for(journey, sent), response, answer)


def errand_for(journey: Journey, sent: Sent) -> Errand:
    """What has the ticket of a prefill leg freed."""
    prefill, headers, raw = sent
    if legs.asks_prompt_scores(journey.body, journey.rules):
        raw = legs.written(legs.without_prompt_scores(journey.body, journey.rules))
    body = partial(legs.decode_body, raw, keep_blocks=False)
    return Errand(journey.request.target, [*headers, *journey.decode_headers], body, prefill, journey.decode)


def decode_leg(journey: Journey, way: Way, ticket: Ticket | None, linger_seconds: float) -> tuple[Leg, bool]:
    """The decode leg, to be entered, and whether a part of its answer is the prefill server's.

    Nothing is when there is no prefill server: then the decode server computes the prompt, and has all its logits.
    """
    assert journey.decode is not None
    raw = journey.raw
    scored = journey.prefill is not None and legs.asks_prompt_scores(journey.body, journey.rules)
    if scored:
        raw = legs.written(legs.without_prompt_scores(journey.body, journey.rules))
    if journey.turn is not None:
        journey.turn.sent_to(journey.decode)
    body = legs.decode_body(raw, ticket, keep_blocks=journey.turn is not None)
    journey.times.decode_sent = time.monotonic()
    return open_leg(journey, way, journey.decode, body, linger_seconds, added=journey.decode_headers), scored


def note_without_ticket(journey: Journey, way: Way) -> None:
    """The prefill server was asked for a ticket and gave none.

    Raises:
        ProxyError: 503, the user wants no request that is not handed over.
    """
    assert journey.prefill is not None
    way.metrics.without_ticket.inc()
    way.transfers.without_ticket(journey.prefill, journey.request_id)


async def prefill_alone(journey: Journey, way: Way) -> Answer:
    """Have the prefill server answer the client's own body: nothing is to be generated, so nothing is handed over.

    Raises:
        NoInstance: no prefill server is usable.
        EngineRefusal: the server answered with an error.
        ProxyError: it broke off, took too long or cannot be reached.
    """
    instance = choose_prefill(journey, way)
    journey.state = State.PREFILLING
    if not journey.times.prefill_sent:
        journey.times.prefill_sent = time.monotonic()
    try:
        async with open_leg(journey, way, instance, (journey.raw,)) as response:
            answer = await read_answer(response)
        journey.times.prefilled = time.monotonic()
        if answer.status != 200:
            raise EngineRefusal(answer)
    except Fault as fault:
        fault.at = Role.PREFILL
        raise
    return answer
