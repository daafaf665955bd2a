"""What the campaign tries: every fault in every phase, both transfer modes, answers in JSON and in events. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster import TransferMode
from baton.sim.requests import CHAT, COMPLETIONS, GENERATE, MESSAGES, PATHS, RESPONSES, read
from baton.sim.settings import EngineSettings
from baton.sim.text import Text, expected

MODEL = "sim"
BLOCK = 16
LEASE_SECONDS = 60.0
"""Longer than any scenario lasts: a lease that nobody releases is seen, and not hidden by its end."""

_SOME = "p=0.3"
_ONE = "engine={role}0"
_ONCE = "engine={role}0,count=1,after=8"
# Fault -> to whom it happens: to some requests on all engines of the role, or to one engine as a whole.
_BOTH: Mapping[str, str] = {
    "delay=0.1": _SOME,
    "hang": _SOME,
    "hang-after-head": _SOME,
    "refuse": _ONE,
    "reset": _SOME,
    "cut": _SOME,
    "status=500": _SOME,
    "status=400": _SOME,
    "status=429": _SOME,
    "front-status=503": _SOME,
    "split=3": _SOME,
    "no-connector": _ONE,
    "pool-full": _ONE,
    "handshake=0.2": _SOME,
    "transfer-fails": _SOME,
    "stall=0.4": _ONCE,
    "restart=0.2": _ONCE,
    "kill": _ONCE,
}
_PREFILL: Mapping[str, str] = {"no-ticket": _SOME, "eos": _SOME, "lease=0.5": "p=1"}
_DECODE: Mapping[str, str] = {}
_STREAM: Mapping[str, str] = {
    "cut-stream=2": _SOME,
    "hang-stream=2": _SOME,
    "error-event=2": _SOME,
    "no-done": _SOME,
}
_PROBE: Mapping[str, str] = {"hang": _ONE, "reset": _SOME, "status=503": _SOME, "delay=0.3": _SOME}


@dataclass(frozen=True)
class Scenario:
    """One batch of requests with one thing going wrong.

    Attributes:
        mode: of the engines.
        stream: whether answers are asked for as events.
        phase: where it goes wrong: prefill, decode, probe, client, or nowhere.
        what: the fault with its value; ``leave`` for clients that leave, ``none`` for nothing.
        fault: the fault in full; None for none.
    """

    mode: TransferMode
    stream: bool
    phase: str
    what: str
    fault: str | None

    @property
    def name(self) -> str:
        return f"{self.mode}/{'stream' if self.stream else 'json'}/{self.phase}/{self.what}"

    @property
    def leaves(self) -> bool:
        """Whether clients leave before they have their answer."""
        return self.phase == "client"

    @property
    def settings(self) -> EngineSettings:
        """How its engines are made."""
        few = self.what.startswith("lease")
        return EngineSettings(
            model=MODEL,
            mode=self.mode,
            block_size=BLOCK,
            kv_blocks=4096,
            max_num_seqs=4 if few else 64,
            max_model_len=4096,
            prefill_tokens_per_second=50_000 if self.leaves else float("inf"),
            decode_step_seconds=0.01 if few else 0.001 if self.stream or self.leaves else 0.0,
            # Heartbeats are sent as often as the reader's own leases ask for.
            lease_seconds=1.0 if few else LEASE_SECONDS,
        )


def scenarios() -> Iterator[Scenario]:
    """All of them."""
    for mode in TransferMode:
        for stream in (False, True):
            yield Scenario(mode, stream, "nowhere", "none", None)
            yield Scenario(mode, stream, "client", "leave", None)
            for phase, letter, own in (("prefill", "P", _PREFILL), ("decode", "D", _DECODE)):
                more = _STREAM if stream and phase == "decode" else {}
                for what, whom in {**_BOTH, **own, **more}.items():
                    words = [what, f"phase={phase}", whom.format(role=letter)]
                    if what.partition("=")[0] in ("refuse", "pool-full", "no-connector"):
                        del words[1]
                    yield Scenario(mode, stream, phase, what, ",".join(words))
            for what, whom in _PROBE.items():
                fault = f"{what},phase=probe,{whom.format(role='P')}"
                yield Scenario(mode, stream, "probe", what, fault)


@dataclass(frozen=True)
class Ask:
    """One request, and the right answer to it."""

    path: str
    body: Mapping[str, Any]
    right: Text


def asks(scenario: Scenario, seed: int, count: int) -> list[Ask]:
    """The requests of a scenario; the same for the same *seed*."""
    chance = random.Random(f"{seed}/{scenario.name}")  # noqa: S311
    return [_ask(scenario, chance, number) for number in range(count)]


def _ask(scenario: Scenario, chance: random.Random, number: int) -> Ask:
    path = chance.choice(PATHS)
    prompt = f"{number} {chance.random()} " + "word " * chance.randrange(60)
    cap = chance.randrange(1, 24)
    messages = [{"role": "user", "content": prompt}]
    body: dict[str, Any] = {"model": MODEL, "stream": scenario.stream}
    if path == COMPLETIONS:
        body |= {"prompt": prompt, "max_tokens": cap}
    elif path == CHAT:
        body |= {"messages": messages, "max_completion_tokens": cap}
    elif path == RESPONSES:
        body |= {"input": prompt, "max_output_tokens": cap}
    elif path == MESSAGES:
        body |= {"messages": messages, "max_tokens": cap}
    elif path == GENERATE:
        ids = [chance.randrange(1000) for _ in range(chance.randrange(1, 100))]
        body |= {"token_ids": ids, "sampling_params": {"max_tokens": cap}}
    job = read(path, body, None, scenario.settings)
    return Ask(path, body, expected(job.prompts[0], job.sampling, BLOCK))
