"""What one engine step holds: prefill of one request or decodes, never both. Pure functions on plain values.

Unlike vLLM, which decides token by token, a step is chosen first, and vLLM's scheduler then sees only the requests that
belong in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """What a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


class Kind(StrEnum):
    """Where a request stands."""

    DECODE = "decode"
    """Running, one token to compute (and the speculative ones)."""
    CHUNK = "chunk"
    """Running, in the middle of its prompt."""
    LOADED = "loaded"
    """Waiting, its KV cache is here, one token to compute: it joins the decodes."""
    PROMPT = "prompt"
    """Waiting, with a prompt to compute: a new one, a preempted one, or one whose KV cache did not come."""
    ASK = "ask"
    """Waiting, and vLLM's scheduler has to look at it without computing: to start its transfer, or to end it."""
    BLOCKED = "blocked"
    """Waiting for something that has not happened: its KV cache, its grammar, its client."""


class Awaits(StrEnum):
    """What a waiting request waits for, beside its turn."""

    NOTHING = "nothing"
    EVENT = "event"
    ITS_END = "its end"


def kind_of(*, running: bool, in_prompt: bool, awaits: Awaits, computed: int, total: int, asks: bool) -> Kind:
    """Where a request stands.

    Args:
        running: whether vLLM runs it, rather than lets it wait.
        in_prompt: of a running one, whether its next tokens are of its prompt.
        awaits: what it waits for.
        computed: tokens whose KV cache is here: of a waiting one those that were transferred, less what failed to come.
        total: tokens that it has.
        asks: whether its ticket says that its KV cache is to be had elsewhere.
    """
    if running:
        return Kind.CHUNK if in_prompt else Kind.DECODE
    if awaits is not Awaits.NOTHING:
        return Kind.BLOCKED if awaits is Awaits.EVENT else Kind.ASK
    if computed > 0:
        return Kind.LOADED if total - computed <= 1 else Kind.PROMPT
    return Kind.ASK if asks else Kind.PROMPT


@dataclass(frozen=True)
class Seen:
    """A request as the choice sees it."""

    id: str
    kind: Kind


@dataclass(frozen=True)
class Step:
    """What vLLM's scheduler is shown.

    Attributes:
        phase: what the step computes; a PREFILL one may turn out to compute nothing.
        shown: ids that it sees; all others are hidden for this step.
        admit: how many waiting requests may start to run; None for as many as there is room for.
        defer_prompts: whether vLLM is told to leave prompts for later, should one turn up.
        starves: whether decodes are ready and don't run.
    """

    phase: Phase
    shown: frozenset[str]
    admit: int | None = None
    defer_prompts: bool = False
    starves: bool = False


def choose(requests: Sequence[Seen], *, streak: int, limit: int, room: bool, fits: bool, decode_first: bool) -> Step:
    """The next step.

    Args:
        requests: running ones first, each group in the order of their arrival.
        streak: steps in a row, up to now, that computed prompts while decodes were ready.
        limit: how many there may be.
        room: whether one more request may run.
        fits: False once a prompt found no free blocks, until some are freed.
        decode_first: whether prompts have to wait for another reason (data parallel ranks that balance).
    """
    by_kind: dict[Kind, list[str]] = {kind: [] for kind in Kind}
    for request in requests:
        by_kind[request.kind].append(request.id)
    running, loaded = by_kind[Kind.DECODE], by_kind[Kind.LOADED]
    ready = bool(running or (loaded and room))
    prompts = bool(by_kind[Kind.CHUNK]) or (room and bool(by_kind[Kind.PROMPT]))
    if ready and not (prompts and fits and streak < limit and not decode_first):
        if not running:
            # vLLM defers prompts only behind a running decode: nothing that may turn out to be one is shown.
            return Step(Phase.DECODE, frozenset(loaded))
        # Whoever is in the middle of its prompt is shown too, as the first to be preempted when blocks run out.
        shown = frozenset((*running, *loaded, *by_kind[Kind.CHUNK], *by_kind[Kind.ASK]))
        return Step(Phase.DECODE, shown, defer_prompts=True)
    if by_kind[Kind.CHUNK]:
        return Step(Phase.PREFILL, frozenset(by_kind[Kind.CHUNK][:1]), admit=0, starves=ready)
    waiting = (*by_kind[Kind.PROMPT], *by_kind[Kind.ASK])
    if waiting and room:
        return Step(Phase.PREFILL, frozenset(waiting), admit=1, starves=ready)
    return Step(Phase.IDLE, frozenset(), admit=0)


class MixedStep(RuntimeError):
    """A step with prefill and something else in it: no graph is made for such a one."""


def phase_of(scheduled: Mapping[str, int], prefills: Iterable[str]) -> Phase:
    """What a step computes.

    Args:
        scheduled: tokens by request.
        prefills: those of them that compute their prompt.

    Raises:
        MixedStep: it holds a prompt and something else; the message names the requests.
    """
    found = [request for request in prefills if request in scheduled]
    if not scheduled:
        return Phase.IDLE
    if not found:
        return Phase.DECODE
    if len(scheduled) > 1:
        others = [request for request in scheduled if request not in found]
        raise MixedStep(
            f"a step holds prefill of {_named(found, scheduled)} and decode of {_named(others, scheduled) or 'none'}: "
            "it may hold one prompt, or decodes"
        )
    return Phase.PREFILL


def _named(requests: Sequence[str], scheduled: Mapping[str, int]) -> str:
    return ", ".join(f"{request} ({scheduled[request]} tokens)" for request in requests)
