"""Requests for several answers: cut into requests for one, and their answers put together.

A ticket carries the KV cache of one prompt to one request. ``n`` samples and lists of prompts are
therefore so many journeys, each with a ticket of its own; the client sees one answer, whose choices are
numbered prompt by prompt as one server numbers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton.proxy.legs import Body, Refused, Rules, Style, fields_of

MOST = 512
"""Answers that one request may ask for: each holds a connection to an engine."""


@dataclass(frozen=True)
class Part:
    """One of the answers that a request asks for.

    Attributes:
        index: its number among the choices.
        prompt: the number of its prompt; parts of one prompt use one prefill server, whose cache then has it.
        body: what asks for it alone.
    """

    index: int
    prompt: int
    body: Body


def parts(body: Body, rules: Rules) -> list[Part]:
    """The parts of a request in the order of their choices; a single one for what is one request already.

    Raises:
        Refused: a prompt that is neither one nor a list of them, or too many parts.
    """
    fields = fields_of(body, rules)
    # The other APIs have no such field, and engines ignore it there.
    samples = (fields.get("n") or 1) if rules.style is Style.OPENAI else 1
    prompts = prompts_of(body) if rules.lists else None
    if samples == 1 and prompts is None:
        return [Part(0, 0, body)]
    bodies = [body] if prompts is None else [{**body, "prompt": prompt} for prompt in prompts]
    if len(bodies) * samples > MOST:
        raise Refused(
            f"{len(bodies)} prompts with n={samples} are {len(bodies) * samples} answers: at most {MOST} a request",
            "n" if samples > 1 else "prompt",
        )
    return [
        Part(place * samples + sample, place, _single(each, rules, sample))
        for place, each in enumerate(bodies)
        for sample in range(samples)
    ]


def prompts_of(body: Body) -> list[Any] | None:
    """The prompts of a list of at least two, or None when it is one prompt: text, or the ids of its tokens.

    Raises:
        Refused: the list mixes both.
    """
    prompt = body.get("prompt")
    if not isinstance(prompt, list) or len(prompt) < 2 or all(isinstance(each, int) for each in prompt):
        return None
    if body.get("prompt_embeds") is not None:
        raise Refused("a list of prompts cannot go with prompt_embeds", "prompt_embeds")
    if not all(isinstance(each, str) for each in prompt) and not all(isinstance(each, list) for each in prompt):
        raise Refused("prompt must be one text, a list of texts, token ids, or a list of lists of those", "prompt")
    return prompt


def _single(body: Body, rules: Rules, sample: int) -> Body:
    """*body* for one sample: a seed is counted up as one server does, so that samples differ and repeat."""
    fields = {name: value for name, value in fields_of(body, rules).items() if name != "n"}
    if isinstance(fields.get("seed"), int):
        fields["seed"] += sample
    return fields if rules.inside is None else {**body, rules.inside: fields}


def joined(answers: Sequence[dict[str, Any]], made: Sequence[Part]) -> dict[str, Any]:
    """One answer from those to each part, in their order."""
    whole = {**answers[0], "choices": []}
    for answer, part in zip(answers, made, strict=True):
        whole["choices"] += [{**choice, "index": part.index} for choice in answer["choices"]]
    usage = summed([(answer.get("usage"), part) for answer, part in zip(answers, made, strict=True)])
    if usage is not None:
        whole["usage"] = usage
    return whole


def summed(usages: Sequence[tuple[dict[str, Any] | None, Part]]) -> dict[str, Any] | None:
    """The usage of all parts: each prompt once, whatever the number of its samples, and every output token.

    None when no part has one.
    """
    known = [(usage, part) for usage, part in usages if usage is not None]
    if not known:
        return None
    whole = dict(known[0][0])
    prompts: dict[int, dict[str, Any]] = {}
    for usage, part in known:
        prompts.setdefault(part.prompt, usage)
    whole["prompt_tokens"] = sum(usage.get("prompt_tokens") or 0 for usage in prompts.values())
    whole["completion_tokens"] = sum(usage.get("completion_tokens") or 0 for usage, _ in known)
    whole["total_tokens"] = whole["prompt_tokens"] + whole["completion_tokens"]
    for name, among in (
        ("prompt_tokens_details", list(prompts.values())),
        ("completion_tokens_details", [usage for usage, _ in known]),
    ):
        details = [usage[name] for usage in among if isinstance(usage.get(name), dict)]
        if details:
            whole[name] = {
                key: sum(each.get(key) or 0 for each in details) if isinstance(value, int) else value
                for key, value in details[0].items()
            }
    return whole


class Weaver:
    """The events of several streams as those of one.

    Every event takes the number of its part and the id of the first; the usage at the end is held back
    until all parts have theirs.

    Args:
        made: the parts, in the order of their streams.
    """

    def __init__(self, made: Sequence[Part]) -> None:
        self._made = made
        self._same: dict[str, Any] = {}
        self._usages: dict[int, dict[str, Any]] = {}
        self._last: dict[str, Any] = {}

    def event(self, place: int, event: dict[str, Any]) -> dict[str, Any] | None:
        """What an event of stream *place* becomes; None when it is held back."""
        if not self._same:
            self._same = {name: event[name] for name in ("id", "created", "request_id") if name in event}
        event.update({name: value for name, value in self._same.items() if name in event})
        choices = event.get("choices")
        if choices == [] and isinstance(event.get("usage"), dict):
            self._usages[place] = event["usage"]
            self._last = event
            return None
        for choice in choices or ():
            choice["index"] = self._made[place].index
        return event

    def usage(self) -> dict[str, Any] | None:
        """The event that ends the whole when usage was asked for."""
        if not self._usages:
            return None
        return {**self._last, "usage": summed([(self._usages.get(part.index), part) for part in self._made])}
