"""Read mode: prefill to the end, then decode with the ticket; the decode server pulls (docs/concepts.md)."""

from __future__ import annotations

from baton.proxy.journey import Deliver, Journey, Way, choose, decode, note_without_ticket, prefill
from baton.proxy.modes.turns import prefill_turn


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
    turn = journey.turn if journey.attempts is None else None
    prefilled = await (prefill(journey, way) if turn is None else prefill_turn(journey, way, turn))
    if prefilled.ticket is None:
        note_without_ticket(journey, way)

    # hand off and decode
    await decode(journey, way, prefilled, deliver)
