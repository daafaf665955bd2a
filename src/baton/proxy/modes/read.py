"""Read mode: prefill to the end, then decode with the ticket; the decode server pulls (docs/concepts.md)."""

from __future__ import annotations

import logging

from baton.proxy.journey import Deliver, Journey, Way, choose, decode, prefill
from baton.proxy.modes.turns import prefill_turn

logger = logging.getLogger("baton.proxy")


async def run_read(journey: Journey, way: Way, deliver: Deliver) -> None:
    """One request for one answer, whole.

    Raises:
        NoInstance: a pool is empty; nothing was sent.
        EngineRefusal: an engine answered with an error.
        ProxyError: a leg failed.
    """
    # admit
    choose(journey, way)

    # prefill
    turn = journey.turn
    prefilled = await (prefill(journey, way) if turn is None else prefill_turn(journey, way, turn))
    if prefilled.ticket is None:
        assert journey.prefill is not None
        way.metrics.without_ticket.inc()
        logger.warning(
            "%s gave no ticket for %s: the decode server computes the prompt itself",
            journey.prefill.id,
            journey.request_id.decode(),
        )

    # hand off and decode
    await decode(journey, way, prefilled, deliver)
