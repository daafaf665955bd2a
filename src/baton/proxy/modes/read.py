"""Read mode: prefill to the end, then decode with the ticket; the decode server pulls (spec/, request flow)."""

from __future__ import annotations

import logging

from baton.proxy.journey import Journey, Reply, Way, choose, decode, prefill
from baton.proxy.ticket import Ticket

logger = logging.getLogger("baton.proxy")


async def run_read(journey: Journey, way: Way, reply: Reply) -> int:
    """One request, whole; the status that the client got.

    Raises:
        NoInstance: a pool is empty; nothing was sent.
        ProxyError: a leg failed before the client's head was sent.
    """
    # admit
    choose(journey, way)

    # prefill
    outcome = await prefill(journey, way)
    if isinstance(outcome, tuple):
        status, kind, body = outcome
        await reply.whole(status, {"Content-Type": kind, **journey.served_by()}, body)
        return status
    if outcome is None:
        assert journey.prefill is not None
        way.metrics.without_ticket.inc()
        logger.warning(
            "%s gave no ticket for %s: the decode server computes the prompt itself",
            journey.prefill.id,
            journey.request_id,
        )

    # hand off and decode
    ticket: Ticket | None = outcome
    return await decode(journey, way, ticket, reply)
