"""What is compared between the fake and real engines: small descriptions of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.sim.requests import CHAT, COMPLETIONS, GENERATE, MESSAGES, PATHS, RESPONSES, TICKET_KEY

PROMPT = "Count the number 1, 2, 3 and so on until the very end of all numbers, one, two, three, four, five, six, seven"
ASK: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


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
        known: parts of differences that are meant, each with its reason.
    """

    name: str
    steps: tuple[Step, ...]
    frees: bool = True
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


def cases() -> list[Case]:
    """What is compared."""
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
        Case("prompt too long", (Step("P", COMPLETIONS, _completion(prompt="word " * 9_000)),)),
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
        ),
        Case(
            "abort with a ticket",
            (
                Step("P", COMPLETIONS, leg(COMPLETIONS)),
                Step("D", COMPLETIONS, _completion(max_tokens=500), ticket=0, leave=0.05),
            ),
        ),
        Case(
            "refusal with a ticket",
            (Step("P", COMPLETIONS, leg(COMPLETIONS)), Step("D", COMPLETIONS, _completion(min_tokens=9), ticket=0)),
        ),
        Case("metrics", (Step("P", "/metrics"), Step("D", "/metrics"))),
    ]
    # Those that leave something behind come last.
    return sorted(made, key=lambda case: not case.frees)
