"""What each leg is sent: pure functions from the client's body to a leg's body.

One table for all endpoints says what the prefill leg caps, drops and adds; the decode leg is the
client's body, untouched but for the ticket and for what only the prefill server can answer.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from baton.hand_over import ASK, TICKET_KEY
from baton.proxy.ticket import CONVERSATION_KEY, DOORS, TRUSTED_KEYS, Ticket, holds_trusted, without_trusted

Body = Mapping[str, Any]


class Style(enum.Enum):
    """Whose words an endpoint speaks: in its usage, its errors, and at the end of its streams."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


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
        style: whose words it speaks.
        lists: whether ``prompt`` may be a list of prompts.
        echoes: whether ``echo`` with ``logprobs`` asks for the prompt's.
        ends: how the last event of a whole stream begins.
        by_body: whether engines read neither X-Request-Id nor X-data-parallel-rank there (vLLM 0.32): the request's
            id can be given in the body, a rank cannot be asked for.
    """

    caps: tuple[str, ...]
    cap: str
    dropped: frozenset[str]
    added: Mapping[str, Any]
    inside: str | None = None
    style: Style = Style.OPENAI
    lists: bool = False
    echoes: bool = False
    ends: tuple[bytes, ...] = (b"data: [DONE]",)
    by_body: bool = False


# min_tokens above the cap is an error; several samples would pin several copies of the blocks.
_SAMPLING = frozenset(
    {"min_tokens", "stop", "stop_token_ids", "n", "best_of", "use_beam_search", "logprobs", "top_logprobs", "echo"}
)
# An error without stream.
_STREAM = frozenset({"stream_options"})
LONG_BODY = 16 << 10
LONG_VALUE = 4 << 10
_SHALLOW = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Objects that may hold what only the proxy may say, or the sampling fields.
_LOOKED_INTO = frozenset({*DOORS, *TRUSTED_KEYS, CONVERSATION_KEY})
_EMPTY = re.compile(rb"\s*\}")
PROMPT_SCORES = ("prompt_logprobs", "prompt_logprob_token_ids")
"""What asks for the logits of the prompt, which only the prefill server sees."""

COMPLETIONS = Rules(
    caps=("max_tokens", "max_completion_tokens"),
    cap="max_tokens",
    dropped=_SAMPLING | _STREAM,
    added={"ignore_eos": True},
    lists=True,
    echoes=True,
)
CHAT = Rules(
    caps=("max_tokens", "max_completion_tokens"),
    cap="max_tokens",
    dropped=_SAMPLING | _STREAM,
    added={"ignore_eos": True},
)
RULES: Mapping[str, Rules] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/responses": Rules(
        caps=("max_output_tokens",),
        cap="max_output_tokens",
        # "include" may ask for logprobs, which must not be asked for alone.
        dropped=_SAMPLING | _STREAM | {"include"},
        added={"ignore_eos": True, "store": False},
        style=Style.RESPONSES,
        ends=(b"event: response.completed", b"event: response.incomplete", b"event: response.failed"),
        by_body=True,
    ),
    "/v1/messages": Rules(
        caps=("max_tokens",),
        cap="max_tokens",
        dropped=frozenset({"stop_sequences"}),
        added={},
        style=Style.ANTHROPIC,
        ends=(b"event: message_stop",),
    ),
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


def parse(raw: bytes, said: dict[str, Any] | None = None) -> tuple[dict[str, Any], bytes]:
    """A client's body as an object, and the bytes that say the same and may reach an engine.

    These are the client's own unless it said what only the proxy may say. In a long body a long value stays as
    it was written (an ``orjson.Fragment``): a prompt passes through, and to read it costs more than all else.

    Args:
        said: gets what the client said to the proxy alone, which is taken out: its conversation and its ticket.

    Raises:
        Refused: it is no JSON object.
    """
    body = _loads(raw) if len(raw) < LONG_BODY else _loads_long(raw)
    if not isinstance(body, dict):
        raise Refused(f"the body must be a JSON object, not {type(body).__name__}")
    if CONVERSATION_KEY in body or holds_trusted(body):
        if said is not None:
            said.update((key, body[key]) for key in (CONVERSATION_KEY, TICKET_KEY) if key in body)
        body = without_trusted(body)
        body.pop(CONVERSATION_KEY, None)
        raw = written(body)
    return body, raw


def written(body: Body) -> bytes:
    """A body as bytes.

    Raises:
        Refused: it is nested too deep.
    """
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise Refused(f"the body cannot be written again: {error}") from error


def _loads(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is not JSON: {error}") from error


def _loads_long(raw: bytes) -> Any:
    try:
        if not raw.isascii():
            raw.decode()
        pieces = _SHALLOW.decode(raw)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError) as error:
        _loads(raw)
        raise Refused(f"the body is not JSON: {error}") from error
    return {
        name: orjson.Fragment(piece)
        if len(piece) > LONG_VALUE and name not in _LOOKED_INTO and not (name == "prompt" and piece.startswith(b"["))
        else _loads(piece)
        for name, value in pieces.items()
        for piece in (bytes(value),)
    }


def check(body: Body, rules: Rules) -> None:
    """Refuse what cannot be handed over.

    Raises:
        Refused: the field at fault by name.
    """
    fields = fields_of(body, rules)
    samples = fields.get("n") if rules.style is Style.OPENAI else None
    if samples is not None and (not isinstance(samples, int) or samples < 1):
        raise Refused(f"n must be an integer of at least 1, not {samples!r}", "n")
    if fields.get("best_of") not in (None, 1) or fields.get("use_beam_search"):
        raise Refused("best_of and beam search are not supported with disaggregated serving", "best_of")
    if body.get("background"):
        raise Refused("background is not supported with disaggregated serving", "background")
    echo = fields.get("echo")
    if echo is not None and not isinstance(echo, bool):
        raise Refused(f"echo must be true or false, not {echo!r}", "echo")
    name = prompt_score(fields)
    if name is not None and body.get("stream"):
        raise Refused(f"{name} is not available with stream", name)


def fields_of(body: Body, rules: Rules) -> Body:
    """The object that holds the sampling fields.

    Raises:
        Refused: it is none.
    """
    if rules.inside is None:
        return body
    fields = body.get(rules.inside) or {}
    if not isinstance(fields, dict):
        raise Refused(f"{rules.inside} must be a JSON object, not {type(fields).__name__}", rules.inside)
    return fields


def echoes_scores(body: Body, rules: Rules) -> bool:
    """Whether the prompt is to come back with its logprobs."""
    return rules.echoes and bool(body.get("echo")) and body.get("logprobs") is not None


def prompt_score(fields: Body) -> str | None:
    """The first field that asks for the logits of the prompt, or None."""
    for name in PROMPT_SCORES:
        if fields.get(name) is not None:
            return name
    return None


def asks_prompt_scores(body: Body, rules: Rules) -> bool:
    """Whether a part of the answer is the prefill server's to give: the decode server has no logits of the prompt."""
    if echoes_scores(body, rules):
        return True
    return prompt_score(fields_of(body, rules)) is not None


def generates_nothing(body: Body, rules: Rules) -> bool:
    """Whether only the prompt is wanted: prefill's answer is all of it."""
    return rules.echoes and bool(body.get("echo")) and body.get("max_tokens") == 0


def prefill_leg(body: Body, rules: Rules = COMPLETIONS, ask: Mapping[str, Any] = ASK) -> dict[str, Any]:
    """The body for the prefill server: one token, in one piece, and the wish for a ticket.

    Args:
        ask: that wish; or the ticket of the turn before, which is one too.
    """
    if rules.inside is None:
        leg = _one_token(body, rules)
    else:
        leg = {name: value for name, value in body.items() if name not in _STREAM}
        leg[rules.inside] = _one_token(fields_of(body, rules), rules)
    if echoes_scores(body, rules):
        leg["echo"], leg["logprobs"] = True, body["logprobs"]
    leg["stream"] = False
    leg[TICKET_KEY] = ask
    return leg


def _one_token(fields: Body, rules: Rules) -> dict[str, Any]:
    dropped = rules.dropped
    made = {name: value for name, value in fields.items() if name not in dropped}
    for name in rules.caps:
        if made.get(name) is not None:
            made[name] = 1
    made[rules.cap] = 1
    made.update(rules.added)
    return made


def without_prompt_scores(body: Body, rules: Rules) -> dict[str, Any]:
    """The body for the decode server when the prefill server answers for the prompt."""
    taken = {*PROMPT_SCORES, "echo"} if rules.echoes else set(PROMPT_SCORES)
    if rules.inside is None:
        return {name: value for name, value in body.items() if name not in taken}
    kept = {name: value for name, value in fields_of(body, rules).items() if name not in taken}
    return {**body, rules.inside: kept}


def with_request_id(body: Body, raw: bytes, request_id: str) -> tuple[dict[str, Any], bytes]:
    """A body and its bytes that give the request an id, for endpoints where engines take it from there alone."""
    if "request_id" in body:
        body = {name: value for name, value in body.items() if name != "request_id"}
        raw = written(body)
    return {**body, "request_id": request_id}, b"".join(_in_front(raw, b'"request_id":%b' % orjson.dumps(request_id)))


def decode_body(raw: bytes, ticket: Ticket | None, keep_blocks: bool | None = None) -> tuple[bytes | memoryview, ...]:
    """The body for the decode server, in pieces: the client's own, to the letter, with the ticket in front.

    Args:
        raw: an object, as :func:`parse` gave it; it is not copied.
        ticket: what prefill gave; without one the decode server computes the prompt itself.
        keep_blocks: whether the decode server is to keep the blocks for the next turn; None does not say.
    """
    if ticket is None:
        return (raw,)
    params = ticket.params if keep_blocks is None else {**ticket.params, "keep_blocks": keep_blocks}
    return _in_front(raw, b'"%b":%b' % (TICKET_KEY.encode(), orjson.dumps(params)))


def _in_front(raw: bytes, pair: bytes) -> tuple[bytes, memoryview]:
    """An object with one more key, in two pieces; *raw* is not copied."""
    start = raw.index(b"{") + 1
    comma = b"" if _EMPTY.match(raw, start) else b","
    return b"{%b%b" % (pair, comma), memoryview(raw)[start:]
