"""Read mode: prefill to the end, then decode with the ticket; the decode server pulls (docs/concepts.md)."""

from __future__ import annotations

import logging

from baton.http import Responder
from baton.proxy.journey import EngineAnswer, Journey, Way, choose, decode, prefill

logger = logging.getLogger("baton.proxy")


async def run_read(journey: Journey, way: Way, responder: Responder) -> int:
    """One request, whole; the status that the client got.

    Raises:
        NoInstance: a pool is empty; nothing was sent.
        ProxyError: a leg failed before the client's head was sent.
    """
    # admit
    choose(journey, way)

    # prefill
    outcome = await prefill(journey, way)
    if isinstance(outcome, EngineAnswer):
        responder.send(outcome.status, journey.answer_head(outcome.content_type), outcome.body)
        return outcome.status
    if outcome is None:
        assert journey.prefill is not None
        way.metrics.without_ticket.inc()
        logger.warning(
            "%s gave no ticket for %s: the decode server computes the prompt itself",
            journey.prefill.id,
            journey.request_id.decode(),
        )

    # hand off and decode
    return await decode(journey, way, outcome, responder)
