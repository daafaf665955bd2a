"""What is compared between the fake and real engines: small descriptions of requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.cluster import TransferMode
from baton.hand_over import ASK, TICKET_KEY
from baton.sim.requests import CHAT, COMPLETIONS, GENERATE, MESSAGES, PATHS, RESPONSES

PROMPT = "Count the number 1, 2, 3 and so on until the very end of all numbers, one, two, three, four, five, six, seven"


@dataclass(frozen=True)
class Step:
    """One request of a case.

    Attributes:
        to: ``P`` or ``D``.
        path: where; a body makes it a POST.
        body: without its model.
        model: another name than the engine's own.
        ticket: the number of the step whose ticket it carries.
        changed: keys of that ticket that are replaced.
        leave: seconds after which the client leaves.
        same_as: the number of a step whose text this one's is compared with.
    """

    to: str
    path: str
    body: Mapping[str, Any] | None = None
    model: str | None = None
    ticket: int | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)
    leave: float | None = None
    same_as: int | None = None


@dataclass(frozen=True)
class Case:
    """A few requests after each other.

    Attributes:
        frees: whether it ends with the prefill server's KV cache empty.
        reads: whether it is of read mode alone: of a ticket that names blocks, or is used otherwise than once.
        turns: whether it is of decode servers that keep turns.
        known: parts of differences that are meant, each with its reason.
    """

    name: str
    steps: tuple[Step, ...]
    frees: bool = True
    reads: bool = False
    turns: bool = False
    known: Mapping[str, str] = field(default_factory=dict)


def _ids(count: int) -> list[int]:
    return [100 + number % 200 for number in range(count)]


BODIES: Mapping[str, Mapping[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT, "max_tokens": 4, "temperature": 0},
    CHAT: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 4, "temperature": 0},
    MESSAGES: {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "temperature": 0},
    GENERATE: {"token_ids": _ids(40), "sampling_params": {"max_tokens": 4, "temperature": 0}},
}


def leg(path: str) -> dict[str, Any]:
    """A prefill leg."""
    body = dict(BODIES[path])
    if path == GENERATE:
        body["sampling_params"] = {**body["sampling_params"], "max_tokens": 1, "ignore_eos": True}
    else:
        body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 1
    return {**body, TICKET_KEY: ASK}


def _completion(**more: Any) -> dict[str, Any]:
    return {**BODIES[COMPLETIONS], **more}


_POISON = "a ticket used twice is refused by Baton's connector, and read all the same by stock vLLM; here it is POISON"
_SYSTEM = "usage of a chat names tokens that were put into a cache; here nobody counts them"


def cases(mode: TransferMode = TransferMode.READ, *, bidirectional: bool = False, longest: int = 1024) -> list[Case]:
    """What is compared of engines in *mode*, which keep turns when they are *bidirectional*.

    Args:
        longest: their context, in tokens.
    """
    chosen = [
        case
        for case in _all(longest)
        if (mode is TransferMode.READ or not case.reads) and (bidirectional or not case.turns)
    ]
    # Those that leave something behind come last.
    return sorted(chosen, key=lambda case: not case.frees)


def _all(longest: int) -> list[Case]:
    made = [
        Case("get health", (Step("P", "/health"), Step("D", "/health"))),
        Case("get models", (Step("P", "/v1/models"),)),
        Case("get version", (Step("P", "/version"),)),
        Case("get load", (Step("P", "/load"),)),
        Case("get engine", (Step("P", "/baton/engine"), Step("D", "/baton/engine"))),
        Case("unknown path", (Step("P", "/nope"),)),
        Case("wrong method", (Step("P", COMPLETIONS),)),
        Case("tokenize", (Step("P", "/tokenize", {"prompt": "hello there"}),)),
    ]
    for path in PATHS:
        body = BODIES[path]
        made += [
            Case(f"plain {path}", (Step("D", path, body),), known={"created_cache_tokens": _SYSTEM}),
            Case(f"stream {path}", (Step("D", path, {**body, "stream": True}),)),
            Case(
                f"hand over {path}",
                (Step("P", path, leg(path)), Step("D", path, body, ticket=0)),
                known={"created_cache_tokens": _SYSTEM},
            ),
            Case(
                f"hand over to a stream {path}",
                (Step("P", path, leg(path)), Step("D", path, {**body, "stream": True}, ticket=0)),
                known={"created_cache_tokens": _SYSTEM},
            ),
            Case(f"bad model {path}", (Step("P", path, body, model="nope"),)),
        ]
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    made += [
        Case("stream with usage", (Step("D", COMPLETIONS, _completion(**usage)),)),
        Case("ticket in a stream", (Step("P", COMPLETIONS, {**leg(COMPLETIONS), "stream": True}),), frees=False),
        Case(
            "several samples, one ticket",
            (Step("P", COMPLETIONS, {**leg(COMPLETIONS), "n": 2, "temperature": 1}),),
            frees=False,
        ),
        Case("several prompts", (Step("D", COMPLETIONS, _completion(prompt=[PROMPT, "hello"])),)),
        Case("no ticket after a stop", (Step("P", COMPLETIONS, {**leg(COMPLETIONS), "max_tokens": 9, "stop": " "}),)),
        Case("several greedy samples", (Step("P", COMPLETIONS, _completion(n=2)),)),
        Case("n of 0", (Step("P", COMPLETIONS, _completion(n=0)),)),
        Case("min_tokens above the cap", (Step("P", COMPLETIONS, _completion(min_tokens=9)),)),
        Case("min_tokens above the cap, chat", (Step("P", CHAT, {**BODIES[CHAT], "min_tokens": 9}),)),
        Case("stream_options without stream", (Step("P", COMPLETIONS, _completion(stream_options=usage)),)),
        Case("cap of 0", (Step("P", COMPLETIONS, _completion(max_tokens=0)),)),
        Case("cap of 0, chat", (Step("P", CHAT, {**BODIES[CHAT], "max_tokens": 0}),)),
        # Not by much: a text that is far too long is refused by its characters, before it is made tokens.
        Case("prompt too long", (Step("P", COMPLETIONS, _completion(prompt="word " * (longest + longest // 4))),)),
        Case("cap too high", (Step("P", COMPLETIONS, _completion(max_tokens=99_999_999)),)),
        Case("no prompt", (Step("P", COMPLETIONS, {}),)),
        Case("negative temperature", (Step("P", COMPLETIONS, _completion(temperature=-1)),)),
        Case(
            "ticket without its keys",
            (Step("D", COMPLETIONS, _completion(kv_transfer_params={"do_remote_prefill": True})),),
        ),
        Case(
            "ticket used twice",
            (
                Step("P", COMPLETIONS, leg(COMPLETIONS)),
                Step("D", COMPLETIONS, BODIES[COMPLETIONS], ticket=0),
                Step("D", COMPLETIONS, _completion(cache_salt="twice"), ticket=0, same_as=1),
            ),
            known={f"3. D {COMPLETIONS}": _POISON},
            reads=True,
        ),
        Case(
            "ticket of an unknown engine",
            (
                Step("P", COMPLETIONS, leg(COMPLETIONS)),
                Step(
                    "D",
                    COMPLETIONS,
                    _completion(prompt=f"y{PROMPT[1:]}"),
                    ticket=0,
                    changed={"remote_engine_id": "nobody"},
                ),
                Step("D", COMPLETIONS, BODIES[COMPLETIONS], ticket=0),
            ),
            reads=True,
        ),
        Case(
            "abort with a ticket",
            (
                Step("P", COMPLETIONS, leg(COMPLETIONS)),
                Step("D", COMPLETIONS, _completion(max_tokens=longest // 2, ignore_eos=True), ticket=0, leave=0.05),
            ),
        ),
        Case(
            "refusal with a ticket",
            (Step("P", COMPLETIONS, leg(COMPLETIONS)), Step("D", COMPLETIONS, _completion(min_tokens=9), ticket=0)),
        ),
        Case("metrics", (Step("P", "/metrics"), Step("D", "/metrics"))),
    ]
    return made + [each for path in (COMPLETIONS, CHAT) for each in _turns(path)]


def _turns(path: str) -> Iterator[Case]:
    """A conversation's second turn, whose prefill starts from what the decode server has kept."""
    body = {**BODIES[path], "ignore_eos": True}
    if path == CHAT:
        said = [*body["messages"], {"role": "assistant", "content": "one"}, {"role": "user", "content": "and then?"}]
        longer: dict[str, Any] = {**body, "messages": said}
    else:
        longer = {**body, "prompt": f"{PROMPT}, eight, nine, ten"}
    first = (Step("P", path, leg(path)), Step("D", path, body, ticket=0))
    second = {**longer, "max_tokens": 1}
    yield Case(
        f"next turn {path}",
        (*first, Step("P", path, second, ticket=1), Step("D", path, longer, ticket=2)),
        known={"created_cache_tokens": _SYSTEM},
        turns=True,
    )
    yield Case(
        f"next turn in a stream {path}",
        (*first, Step("P", path, second, ticket=1), Step("D", path, {**longer, "stream": True}, ticket=2)),
        known={"created_cache_tokens": _SYSTEM},
        turns=True,
    )
    yield Case(
        f"a turn that is another's {path}",
        (*first, Step("P", path, {**second, **_other(path)}, ticket=1)),
        known={"created_cache_tokens": _SYSTEM},
        frees=False,
        turns=True,
    )
    yield Case(
        f"a turn that is not kept {path}",
        (Step("P", path, leg(path)), Step("D", path, body, ticket=0, changed={"keep_blocks": False})),
        known={"created_cache_tokens": _SYSTEM},
        turns=True,
    )


def _other(path: str) -> dict[str, Any]:
    if path == CHAT:
        return {"messages": [{"role": "user", "content": f"No: {PROMPT}"}]}
    return {"prompt": f"No: {PROMPT}"}
