"""Which graphs an engine makes before it answers, by its role. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.engine.static.buckets import StaticShapes
from baton.engine.static.steps import Phase

SKIP = {
    Phase.PREFILL: ("BATON_SKIP_PREFILL_WARMUP", "VLLM_NEURON_SKIP_PREFILL_WARMUP"),
    Phase.DECODE: ("BATON_SKIP_DECODE_WARMUP", "VLLM_NEURON_SKIP_DECODE_WARMUP"),
}
"""Either name of a phase's variable set to 1 leaves its graphs out; the second is spec's."""

_OTHER_ROLE = {Phase.PREFILL: "kv_consumer", Phase.DECODE: "kv_producer"}


@dataclass(frozen=True)
class Target:
    """A graph to make.

    Attributes:
        phase: what it is for.
        bucket: as the user knows it: tokens of a prefill, requests of a decode.
        rows: tokens that it computes.
    """

    phase: Phase
    bucket: int
    rows: int

    @property
    def name(self) -> str:
        return f"{self.phase} bucket {self.bucket}"


def phases(role: str | None, environ: Mapping[str, str]) -> frozenset[Phase]:
    """The phases that an engine makes graphs for.

    Args:
        role: its ``kv_role``; None for an engine that hands nothing over.

    Raises:
        ValueError: a variable is neither 0 nor 1, or its two names differ.
    """
    return frozenset(phase for phase in SKIP if role != _OTHER_ROLE[phase] and not _skipped(phase, environ))


def targets(shapes: StaticShapes, wanted: frozenset[Phase], tokens_a_row: int = 1) -> list[Target]:
    """The graphs of the *wanted* phases, largest first: what fails for want of memory fails at once."""
    made = [Target(Phase.PREFILL, size, size) for size in shapes.tokens if Phase.PREFILL in wanted]
    made += [Target(Phase.DECODE, size, size * tokens_a_row) for size in shapes.seqs if Phase.DECODE in wanted]
    return sorted(made, key=lambda target: -target.rows)


def _skipped(phase: Phase, environ: Mapping[str, str]) -> bool:
    given = {name: environ[name] for name in SKIP[phase] if environ.get(name)}
    for name, value in given.items():
        if value not in ("0", "1"):
            raise ValueError(f"{name}={value!r} is neither 0 nor 1")
    if len(set(given.values())) > 1:
        raise ValueError(f"{' and '.join(f'{name}={value}' for name, value in given.items())} differ: give one of them")
    return "1" in given.values()
