"""What engines answer, and what the client gets of it.

An engine's answer passes as it came, byte for byte, but for three things: what names hosts and blocks is taken out,
cached tokens are the prefill server's (the decode server takes what it was handed for a hit in its cache),
and what only the prefill server can know of the prompt is put in. An answer that says that generation failed
is an error, whatever its status.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.hand_over import TICKET_KEY
from baton.http import data_of, split, with_data
from baton.proxy import legs
from baton.proxy.errors import ProxyError
from baton.proxy.legs import Body, Rules, Style
from baton.proxy.ticket import TRUSTED_KEYS, Ticket
from baton.proxy.turns import Turn

# Every event is searched for these words; with bytes.find, since `in` makes an exception and forgets it for each.
# In JSON a quote within a text is escaped: these match keys and values, never what a model wrote. They can be what a
# client wrote, since /v1/responses says its metadata and tools again: who finds one looks where it stands.
_TRUSTED = re.compile(rb'"(?:kv|ec)_transfer_params"\s*:(?!\s*null)')
_FAILED = re.compile(rb'"finish_reason"\s*:\s*"(?:error|abort)"')
# What every chunk says of the stream it belongs to.
_ENVELOPE = frozenset({"id", "object", "created", "model", "system_fingerprint", "service_tier"})
_SCORES = (*legs.PROMPT_SCORES, "prompt_token_id_logprobs")


@dataclass(frozen=True)
class Prefilled:
    """What the prefill leg brought.

    Attributes:
        ticket: None when the server gave none.
        answer: its whole answer.
    """

    ticket: Ticket | None
    answer: Mapping[str, Any]


def failed(raw: bytes) -> bool:
    """Whether an answer, or the data of an event, says that generation failed or was broken off."""
    if not suspicious(raw) or _FAILED.search(raw) is None:
        return False
    try:
        return says_failed(orjson.loads(raw))
    except orjson.JSONDecodeError:
        return True


def says_failed(answer: Any) -> bool:
    """The same of one that is parsed."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return isinstance(choices, list) and any(
        isinstance(each, dict) and each.get("finish_reason") in ("error", "abort") for each in choices
    )


def ticket_of(status: int, raw: bytes, now: float) -> Ticket | None:
    """The ticket in a prefill server's whole answer, if it gave one."""
    if status != 200:
        return None
    try:
        return Ticket.from_answer(orjson.loads(raw), now)
    except orjson.JSONDecodeError:
        return None


def suspicious(raw: bytes) -> bool:
    """Whether an answer can speak of a failure."""
    return raw.find(b'"error"') >= 0 or raw.find(b'"abort"') >= 0


def is_error(event: bytes, data: bytes) -> bool:
    """Whether an event is an engine's error."""
    return event.startswith(b"event: error") or data.startswith((b'{"error"', b'{ "error"'))


def names_hosts(raw: bytes) -> bool:
    return raw.find(b"_transfer_params") >= 0 and _TRUSTED.search(raw) is not None


def counts_cached(raw: bytes) -> bool:
    return raw.find(b"cached_tokens") >= 0 or raw.find(b"cache_read_input_tokens") >= 0


class Correction:
    """What is put right in the decode server's answer to one request.

    Args:
        rules: of the endpoint.
        body: the client's.
        prefilled: what the prefill leg brought.
        scored: whether a part of the answer is the prefill server's (:func:`legs.asks_prompt_scores`).

    Attributes:
        turn: what takes the decode server's ticket for the next request; None when nobody will.
    """

    __slots__ = ("_body", "_cached", "_handed_over", "_prompt", "_rules", "turn")

    def __init__(self, rules: Rules, body: Body, prefilled: Prefilled, scored: bool, turn: Turn | None = None) -> None:
        self._rules = rules
        self._body = body
        self._handed_over = prefilled.ticket is not None
        self._cached = cached_of(prefilled.answer, rules.style)
        # Put in once: into the whole answer, or into the first event that carries text.
        self._prompt = prefilled.answer if scored else None
        self.turn = turn

    def concerns(self, raw: bytes) -> bool:
        """Whether an answer, or a run of events, can have something to put right; a guess on the safe side."""
        return (
            self._prompt is not None
            or (self._handed_over and counts_cached(raw))
            or names_hosts(raw)
            or suspicious(raw)
        )

    def whole(self, raw: bytes) -> bytes:
        """The answer for the client.

        Raises:
            ProxyError: it says that generation failed, or is no JSON object.
        """
        if not self.concerns(raw):
            return raw
        body = orjson.dumps(self.value(raw))
        if self.turn is not None:
            self.turn.keep()
        return body

    def value(self, raw: bytes) -> dict[str, Any]:
        """The same, parsed."""
        if failed(raw):
            raise generation_failed()
        try:
            answer = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise ProxyError(502, "the decode server's answer is not JSON", retry=True) from error
        if not isinstance(answer, dict):
            raise ProxyError(502, "the decode server's answer is not a JSON object", retry=True)
        return self.put_right(answer)

    def run(self, run: bytes) -> tuple[bytes, bytes | None]:
        """A run of whole events for the client, and the error that the stream ends with, in JSON, or None."""
        made: list[bytes] = []
        for event in split(run):
            if not self.concerns(event):
                made.append(event)
                continue
            data = data_of(event)
            if is_error(event, data):
                return b"".join(made), data
            if failed(data):
                return b"".join(made), generation_failed().body(self._rules.style)
            try:
                value = orjson.loads(data)
            except orjson.JSONDecodeError:
                value = None
            if isinstance(value, dict):
                value = self.put_right(value)
                # A ticket that stood alone in its event leaves nothing.
                if not (names_hosts(event) and says_nothing(value)):
                    made.append(with_data(event, orjson.dumps(value)))
            elif not names_hosts(event):
                made.append(event)
        return b"".join(made), None

    def put_right(self, answer: dict[str, Any]) -> dict[str, Any]:
        """An answer, or the data of an event, put right in place."""
        given: object = None
        holders = (answer, answer.get("response"), answer.get("message"))
        for holder in holders:
            if not isinstance(holder, dict):
                continue
            for key in TRUSTED_KEYS:
                taken = holder.pop(key, None)
                if key == TICKET_KEY:
                    given = given or taken
            if self._handed_over and isinstance(holder.get("usage"), dict):
                correct_usage(holder["usage"], self._rules.style, self._cached)
        if self._prompt is not None and answer.get("choices"):
            prompt, self._prompt = self._prompt, None
            add_prompt(answer, prompt, self._body, self._rules)
        if given and self.turn is not None and not any(map(is_broken, holders)):
            echoed = self.turn.found(given)
            if echoed is not None:
                answer[TICKET_KEY] = echoed
        return answer


def is_broken(response: object) -> bool:
    """Whether an answer in the words of /v1/responses says that it is none."""
    return isinstance(response, dict) and response.get("status") in ("failed", "cancelled")


def says_nothing(event: Mapping[str, Any]) -> bool:
    """Whether the data of an event is only what each of its stream has."""
    return not any(value for name, value in event.items() if name not in _ENVELOPE)


def generation_failed() -> ProxyError:
    return ProxyError(502, "the decode server failed while it generated the answer", retry=True)


def cached_of(answer: Mapping[str, Any], style: Style) -> int | None:
    """How many tokens of the prompt a server says it had in its cache; None when it doesn't say."""
    usage = answer.get("usage")
    if not isinstance(usage, dict):
        return None
    if style is Style.ANTHROPIC:
        return usage.get("cache_read_input_tokens")
    details = usage.get("prompt_tokens_details" if style is Style.OPENAI else "input_tokens_details")
    return details.get("cached_tokens") if isinstance(details, dict) else None


def correct_usage(usage: dict[str, Any], style: Style, cached: int | None) -> None:
    """Make *cached* the cached tokens of *usage*, in place; nothing is added where nothing is said."""
    if style is Style.ANTHROPIC:
        said = usage.get("cache_read_input_tokens")
        if said is not None:
            usage["cache_read_input_tokens"] = cached or 0
            # What was read from the cache is not in input_tokens.
            usage["input_tokens"] += said - (cached or 0)
        return
    name = "prompt_tokens_details" if style is Style.OPENAI else "input_tokens_details"
    details = usage.get(name)
    if not isinstance(details, dict) or "cached_tokens" not in details:
        return
    if style is Style.OPENAI and cached is None:
        usage[name] = None
        return
    details["cached_tokens"] = cached or 0
    if "cached_tokens_per_turn" in details:
        details["cached_tokens_per_turn"] = [cached or 0]


def add_prompt(answer: dict[str, Any], prompt: Mapping[str, Any], body: Body, rules: Rules) -> None:
    """Put what the prefill server said of the prompt (*prompt*, its answer) into the decode server's answer."""
    for name in _SCORES:
        if prompt.get(name) is not None:
            answer[name] = prompt[name]
    theirs = next(iter(prompt.get("choices") or ()), None)
    if not isinstance(theirs, dict):
        return
    ours = answer["choices"][0]
    for name in _SCORES:
        if theirs.get(name) is not None:
            ours[name] = theirs[name]
    if legs.echoes_scores(body, rules) and isinstance(theirs.get("logprobs"), dict):
        echo(ours, theirs, body.get("prompt"))


def echo(choice: dict[str, Any], prefill: Mapping[str, Any], prompt: Any) -> None:
    """Put the prompt, with its logprobs, before a choice's text, in place.

    Args:
        choice: the decode server's, of the answer's tokens alone.
        prefill: the prefill server's: the prompt and one token, which is thrown away.
        prompt: the client's, as text or as token ids.
    """
    scores = prefill["logprobs"]
    last = scores["tokens"][-1] if scores["tokens"] else ""
    text = prompt if isinstance(prompt, str) else prefill["text"].removesuffix(last)
    offset = scores["text_offset"][-1] if scores["text_offset"] else len(text)
    choice["text"] = text + choice["text"]
    own = choice.get("logprobs") or {}
    own["text_offset"] = [at + offset for at in own.get("text_offset") or ()]
    choice["logprobs"] = {
        name: values[:-1] + (own.get(name) or []) for name, values in scores.items() if isinstance(values, list)
    }
