"""What each leg is sent: pure functions from the client's body to a leg's body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from baton.proxy.ticket import ASK, TICKET_KEY, Ticket

Body = Mapping[str, Any]

GENERATION = ("/v1/completions", "/v1/chat/completions")
"""The endpoints that go through both phases."""

TOKEN_CAPS = ("max_tokens", "max_completion_tokens")
"""Every name for a limit on output tokens; an engine looks at more than one."""

_DROPPED = frozenset(
    {
        # Contradict an answer of one token, or are errors without stream.
        "min_tokens",
        "stream_options",
        # The one token must end by length: at a stop the engine frees the blocks and gives no ticket.
        "stop",
        "stop_token_ids",
        # Several samples would pin several copies of the blocks.
        "n",
        "best_of",
        "use_beam_search",
        # Of no use on a token that is thrown away.
        "logprobs",
        "top_logprobs",
        TICKET_KEY,
    }
)


class Refused(ValueError):
    """A body that the proxy does not take.

    Attributes:
        param: the field at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def check(body: Any) -> Body:
    """*body*, when it can be handed over.

    Raises:
        Refused: it is no object, or asks for what one ticket cannot carry.
    """
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, not {type(body).__name__}")
    if (body.get("n") or 1) != 1:
        raise Refused(f"n={body['n']!r} is not supported with disaggregated serving: send n requests", "n")
    if body.get("best_of") not in (None, 1) or body.get("use_beam_search"):
        raise Refused("best_of and beam search are not supported with disaggregated serving", "best_of")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        raise Refused("a list of prompts is not supported with disaggregated serving: send one request each", "prompt")
    for name in ("echo", "prompt_logprobs"):
        # The decode server never sees the prompt's logits; an answer without them would be a wrong one.
        if body.get(name) is not None and body[name] is not False:
            raise Refused(f"{name} is not supported with disaggregated serving", name)
    return body


def prefill_leg(body: Body) -> dict[str, Any]:
    """The body for the prefill server: one token, in one piece, and the wish for a ticket."""
    leg = {name: value for name, value in body.items() if name not in _DROPPED}
    leg.update({name: 1 for name in TOKEN_CAPS if body.get(name) is not None})
    leg.update(max_tokens=1, stream=False, ignore_eos=True)
    leg[TICKET_KEY] = dict(ASK)
    return leg


def decode_leg(body: Body, ticket: Ticket | None) -> dict[str, Any]:
    """The body for the decode server: the client's own, with the ticket.

    Without a ticket the decode server computes the prompt itself. A ticket that the client
    sent is dropped in any case: it would name hosts and blocks.
    """
    leg = {name: value for name, value in body.items() if name != TICKET_KEY}
    if ticket is not None:
        leg[TICKET_KEY] = dict(ticket.params)
    return leg


def decode_bytes(raw: bytes, body: Body, ticket: Ticket | None) -> bytes:
    """:func:`decode_leg` as bytes: the client's own, to the letter, with the ticket in front.

    Args:
        raw: what the client sent, of which *body* is the parsed form.
        body: as checked.
        ticket: what prefill gave.
    """
    if TICKET_KEY in body or not body:
        return orjson.dumps(decode_leg(body, ticket))
    if ticket is None:
        return raw
    start = raw.index(b"{") + 1
    return b'{"%b":%b,%b' % (TICKET_KEY.encode(), orjson.dumps(ticket.params), raw[start:])
