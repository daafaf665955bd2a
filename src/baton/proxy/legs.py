"""What each leg is sent: pure functions from the client's body to a leg's body.

One table for all endpoints says what the prefill leg caps, drops and adds; the decode leg is the
client's body, untouched but for the ticket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.proxy.ticket import ASK, TICKET_KEY, Ticket

Body = Mapping[str, Any]


@dataclass(frozen=True)
class Rules:
    """How one endpoint's body becomes a prefill leg.

    Attributes:
        caps: every name for a limit on output tokens; an engine looks at more than one.
        cap: the one that is set to 1 in any case.
        dropped: what contradicts a single token that is thrown away.
        added: what makes that token the last whatever it is: a request that ends by a stop frees its blocks
            and gives no ticket.
        inside: the object within the body that holds these fields; None for the body itself.
    """

    caps: tuple[str, ...]
    cap: str
    dropped: frozenset[str]
    added: Mapping[str, Any]
    inside: str | None = None


# min_tokens above the cap is an error; several samples would pin several copies of the blocks.
_SAMPLING = frozenset(
    {"min_tokens", "stop", "stop_token_ids", "n", "best_of", "use_beam_search", "logprobs", "top_logprobs"}
)
# An error without stream.
_STREAM = frozenset({"stream_options"})

COMPLETIONS = Rules(
    caps=("max_tokens", "max_completion_tokens"),
    cap="max_tokens",
    dropped=_SAMPLING | _STREAM,
    added={"ignore_eos": True},
)
RULES: Mapping[str, Rules] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": COMPLETIONS,
    "/v1/responses": Rules(
        caps=("max_output_tokens",),
        cap="max_output_tokens",
        # "include" may ask for logprobs, which must not be asked for alone.
        dropped=_SAMPLING | _STREAM | {"include"},
        added={"ignore_eos": True, "store": False},
    ),
    "/v1/messages": Rules(caps=("max_tokens",), cap="max_tokens", dropped=frozenset({"stop_sequences"}), added={}),
    "/inference/v1/generate": Rules(
        caps=("max_tokens",),
        cap="max_tokens",
        dropped=_SAMPLING,
        added={"ignore_eos": True},
        inside="sampling_params",
    ),
}
"""The endpoints that go through both phases."""


class Refused(ValueError):
    """A body that the proxy does not take.

    Attributes:
        param: the field at fault.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def check(body: Any, rules: Rules = COMPLETIONS) -> Body:
    """*body*, when it can be handed over.

    Raises:
        Refused: it is no object, or asks for what one ticket cannot carry.
    """
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, not {type(body).__name__}")
    fields = body if rules.inside is None else body.get(rules.inside) or {}
    if not isinstance(fields, dict):
        raise Refused(f"{rules.inside} must be a JSON object, not {type(fields).__name__}", rules.inside)
    if (fields.get("n") or 1) != 1:
        raise Refused(f"n={fields['n']!r} is not supported with disaggregated serving: send n requests", "n")
    if fields.get("best_of") not in (None, 1) or fields.get("use_beam_search"):
        raise Refused("best_of and beam search are not supported with disaggregated serving", "best_of")
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(token, int) for token in prompt):
        raise Refused("a list of prompts is not supported with disaggregated serving: send one request each", "prompt")
    if body.get("background"):
        raise Refused("background is not supported with disaggregated serving", "background")
    for name in ("echo", "prompt_logprobs"):
        # The decode server never sees the prompt's logits; an answer without them would be a wrong one.
        if fields.get(name) is not None and fields[name] is not False:
            raise Refused(f"{name} is not supported with disaggregated serving", name)
    return body


def prefill_leg(body: Body, rules: Rules = COMPLETIONS) -> dict[str, Any]:
    """The body for the prefill server: one token, in one piece, and the wish for a ticket."""
    if rules.inside is None:
        leg = _one_token(body, rules)
    else:
        leg = {name: value for name, value in body.items() if name not in _STREAM}
        leg[rules.inside] = _one_token(body.get(rules.inside) or {}, rules)
    leg["stream"] = False
    leg[TICKET_KEY] = dict(ASK)
    return leg


def _one_token(fields: Body, rules: Rules) -> dict[str, Any]:
    made = {name: value for name, value in fields.items() if name not in rules.dropped}
    made.update({name: 1 for name in rules.caps if fields.get(name) is not None})
    made[rules.cap] = 1
    return {**made, **rules.added}


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
