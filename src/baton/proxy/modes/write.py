"""Write mode: both legs at once; the prefill server pushes to the decode server, which waits (docs/concepts.md)."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence

from baton.cluster import Role
from baton.http import ClientError, Header
from baton.proxy import legs
from baton.proxy.answers import Correction, Prefilled
from baton.proxy.errors import Fault, ProxyError
from baton.proxy.journey import (
    Deliver,
    EngineRefusal,
    Journey,
    State,
    Way,
    choose,
    decode,
    decode_leg,
    note_without_ticket,
    prefill,
    settle,
    worked,
)
from baton.proxy.release import LINGER_SECONDS
from baton.proxy.ticket import Ticket, push_ticket
from baton.proxy.upstream import Leg, read_answer

logger = logging.getLogger("baton.proxy")


async def run_write(journey: Journey, way: Way, deliver: Deliver) -> None:
    """One request for one answer, whole.

    The first leg that fails ends the other. The client hears nothing before the prefill server has answered.

    Raises:
        NoInstance: a pool is empty; nothing was sent.
        EngineRefusal: an engine answered with an error.
        ProxyError: a leg failed.
    """
    # admit
    choose(journey, way)
    if journey.rules.by_body:
        # Engines match the legs by their request's id; random, since answers are found again by it.
        request_id = f"resp_{secrets.token_hex(16)}"
        journey.body, journey.raw = legs.with_request_id(journey.body, journey.raw, request_id)

    # prefill and decode, at once when it is known where the KV cache will come from
    told, rank = early_ticket(journey)
    if told is None:
        prefilled = await prefill(journey, way)
    else:
        rest = await run_both(journey, way, told, rank, deliver)
        if rest is None:
            return
        prefilled = rest

    # decode with what prefill says, when it could not be known or was not as known
    if prefilled.ticket is None:
        note_without_ticket(journey, way)
    elif way.fleet.conflict is not None:
        # No decode server can be told of it: a ticket of another transfer mode is none of theirs.
        assert journey.prefill is not None
        way.outstanding.leave(prefilled.ticket, journey.prefill)
        raise ProxyError(503, way.fleet.conflict, retry_after=1)
    await decode(journey, way, prefilled, deliver)


def early_ticket(journey: Journey) -> tuple[Ticket | None, Sequence[Header]]:
    """The decode leg's ticket before prefill has answered, and what the prefill leg must say to make it true.

    None when nobody has said what the prefill server is, or which of its ranks will take the request.
    """
    instance = journey.prefill
    assert instance is not None
    info = instance.info
    if info is None or (info.dp_size > 1 and journey.rules.by_body):
        return None, ()
    rank = instance.next_rank()
    said = [(b"x-data-parallel-rank", b"%d" % rank)] if info.dp_size > 1 else []
    return push_ticket(info, rank, journey.request_id.decode(), time.monotonic()), said


async def run_both(
    journey: Journey, way: Way, told: Ticket, rank: Sequence[Header], deliver: Deliver
) -> Prefilled | None:
    """Both legs at once, to the end of the answer.

    Returns:
        What prefill brought, when the decode server was told wrong: its leg is closed, and another is due. Else None.
    """
    assert journey.prefill is not None
    leg, _ = decode_leg(journey, way, told, 0.0)
    good: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
    prefilling = asyncio.create_task(prefill(journey, way, added=rank))
    decoding = asyncio.create_task(deliver_when_good(journey, way, leg, good, deliver))
    try:
        # The decode leg cannot end well before it is told that the other has.
        await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
        failure = first_failure(prefilling, decoding)
        if failure is not None:
            if isinstance(failure, Fault) and failure.at is None:
                failure.at = Role.DECODE
            if decoding.done() and isinstance(failure, EngineRefusal) and not of_client(failure):
                # That is how a decode server says that the engine it was sent to is no more.
                journey.prefill.doubt()
            raise failure
        prefilled = prefilling.result()
        if prefilled.ticket is None or prefilled.ticket.engine_id != told.engine_id:
            note_told_wrong(journey, told, prefilled)
            return prefilled
        if not good.done():
            good.set_result(prefilled)
        # Whoever leaves from here on: the decode server must have seen the request, to have P free its blocks.
        leg.linger(LINGER_SECONDS)
        await decoding
        worked(journey, way, prefilled.ticket)
        return None
    except BaseException as error:
        if succeeded(prefilling):
            leg.linger(LINGER_SECONDS)
            settle(journey, way, journey.ticket, leg, error)
        raise
    finally:
        prefilling.cancel()
        decoding.cancel()
        await asyncio.gather(prefilling, decoding, return_exceptions=True)


async def deliver_when_good(
    journey: Journey, way: Way, leg: Leg, good: asyncio.Future[Prefilled], deliver: Deliver
) -> None:
    """Run the decode leg, and deliver its answer once the prefill leg is known to be *good*.

    Raises:
        EngineRefusal: the server answered with an error.
        ProxyError: it broke off, failed, took too long or cannot be reached.
    """

    def broke(error: ClientError) -> None:
        if not good.done():
            good.set_exception(error)

    async with leg as response:
        journey.times.decode_head = time.monotonic()
        if response.status != 200:
            raise EngineRefusal(await read_answer(response))
        # The head of a stream comes long before its first token.
        response.watch(broke)
        prefilled = await good
        journey.state = State.DECODING
        way.metrics.handed_off.inc()
        scored = legs.asks_prompt_scores(journey.body, journey.rules)
        await deliver(journey, response, Correction(journey.rules, journey.body, prefilled, scored))


def succeeded(prefilling: asyncio.Task[Prefilled]) -> bool:
    """Whether the prefill leg has ended well, perhaps unseen: its ticket is out."""
    return prefilling.done() and not prefilling.cancelled() and prefilling.exception() is None


def first_failure(prefilling: asyncio.Task[Prefilled], decoding: asyncio.Task[None]) -> BaseException | None:
    """What the client is told of legs that may have failed; None when none has.

    Of two failures at once the client's own mistake, else the prefill server's: as in read mode.
    """
    found = [error for leg in (prefilling, decoding) if leg.done() and (error := leg.exception()) is not None]
    return min(found, key=lambda error: not of_client(error), default=None)


def of_client(error: BaseException) -> bool:
    """Whether an engine says that the client is wrong."""
    return isinstance(error, EngineRefusal) and error.answer.status < 500


def note_told_wrong(journey: Journey, told: Ticket, prefilled: Prefilled) -> None:
    """The decode server waits for an engine that won't come: another has answered, or none has kept anything."""
    ticket = prefilled.ticket
    if ticket is None:
        return
    assert journey.prefill is not None
    logger.warning(
        "%s was taken for the engine %s and is %s: the decode leg of %s is run again",
        journey.prefill.id,
        told.engine_id,
        ticket.engine_id,
        journey.request_id.decode(),
    )
    journey.prefill.correct(ticket.params)
