"""Conversations in read mode: what a request says of its own, and a prefill leg that starts from the turn before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from baton.hand_over import TICKET_KEY
from baton.proxy import legs
from baton.proxy.answers import Prefilled
from baton.proxy.door import tenant
from baton.proxy.errors import ProxyError
from baton.proxy.journey import EngineRefusal, Journey, Way, prefill
from baton.proxy.ticket import CONVERSATION_KEY
from baton.proxy.turns import Turn, TurnStore, client_ticket

logger = logging.getLogger("baton.proxy")

SESSION = b"x-session-id"
LONGEST = 256
"""Bytes that the name of a conversation may have."""


def turn_of(journey: Journey, store: TurnStore, said: Mapping[str, Any], answers: int) -> Turn | None:
    """What a request has to do with turns; None when it has nothing.

    Args:
        said: what the client said to the proxy alone (:func:`legs.parse`).
        answers: how many it asks for.

    Raises:
        legs.Refused: its conversation has no good name, or two.
    """
    conversation = conversation_of(journey.request.header(SESSION), said.get(CONVERSATION_KEY))
    if conversation is None and store.signer is None:
        return None
    # Several answers: none of them is the one that the next turn goes on from, and each has a prefill leg, where a
    # ticket is good for one. Scores of the prompt: they need every position of it computed, also what might be pulled.
    # An echo alone: there is no decode server. In all three the turn before stays for the request that can use it.
    if (
        answers != 1
        or legs.asks_prompt_scores(journey.body, journey.rules)
        or legs.generates_nothing(journey.body, journey.rules)
    ):
        return None
    model = journey.body.get("model")
    # Another model is another cache, also when it is the same engine's (LoRA).
    owner = (tenant(journey.request), model if isinstance(model, str) else "")
    return Turn(store, owner, conversation, client_ticket(said.get(TICKET_KEY)))


def conversation_of(header: bytes | None, field: object) -> bytes | None:
    """The name of the conversation that a request belongs to; None when it says none.

    Raises:
        legs.Refused: it is no text, too long, or header and body name different ones.
    """
    if field is not None and not isinstance(field, str):
        raise legs.Refused(f"{CONVERSATION_KEY} must be a text, not {type(field).__name__}", CONVERSATION_KEY)
    named = field.encode() if field else None
    for what, name in (("X-Session-ID", header), (CONVERSATION_KEY, named)):
        if name and len(name) > LONGEST:
            raise legs.Refused(f"{what} has {len(name)} bytes: at most {LONGEST}", CONVERSATION_KEY)
    if header and named and header != named:
        raise legs.Refused(
            f"X-Session-ID and {CONVERSATION_KEY} name different conversations: send one of them", CONVERSATION_KEY
        )
    return header or named


async def prefill_turn(journey: Journey, way: Way, turn: Turn) -> Prefilled:
    """Run the prefill leg with the ticket of the turn before; as usual when there is none, or when it is not taken.

    Raises:
        EngineRefusal, ProxyError: as :func:`baton.proxy.journey.prefill`.
    """
    ticket = turn.take()
    if ticket is None:
        return await prefill(journey, way)
    try:
        return await prefill(journey, way, ticket)
    except EngineRefusal as error:
        # Also a 4xx: it may be the ticket that is wrong, and if it is the request the next answer says so again.
        why = str(error)
    except ProxyError as error:
        if error.status != 502:
            raise
        why = error.message
    turn.refused()
    logger.warning("the turn before %s is not used, its prompt is computed anew: %s", journey.request_id.decode(), why)
    return await prefill(journey, way)
