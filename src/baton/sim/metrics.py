"""What a fake engine counts, under vLLM's names (0.32), as Prometheus' text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from baton.sim.fabric import Fabric
from baton.sim.rank import Rank
from baton.sim.settings import EngineSettings
from baton.sim.text import Text


class Tokens(Protocol):
    """Tokens of one request."""

    @property
    def prompt(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def answer(self) -> int: ...


class Origin(Protocol):
    """Where the prompt's KV cache came from."""

    @property
    def computed(self) -> bool: ...


@dataclass
class EngineCounts:
    """Counters of one engine, from its first start on.

    Attributes:
        refused, failed: requests that got a 400, or broke.
        by_source: tokens of prompts by where their KV cache came from, in vLLM's words.
        finished: requests by the reason of their end.
    """

    refused: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    by_source: Counter[str] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)

    def answered(self, counts: Tokens, texts: Sequence[Text], origin: Origin) -> None:
        self.prompt_tokens += counts.prompt
        self.cached_tokens += counts.cached
        self.answer_tokens += counts.answer
        if origin.computed:
            self.by_source["local_compute"] += counts.prompt - counts.cached
            self.by_source["local_cache_hit"] += counts.cached
        else:
            self.by_source["external_kv_transfer"] += counts.cached
            self.by_source["local_compute"] += counts.prompt - counts.cached
        for text in texts:
            self.finished[text.finish] += 1


def render(counts: EngineCounts, ranks: Sequence[Rank], fabric: Fabric, settings: EngineSettings) -> bytes:
    """All metrics of an engine."""
    lines: list[str] = []

    def family(name: str, kind: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> None:
        lines.append(f"# HELP {name} of a fake engine")
        lines.append(f"# TYPE {name} {kind}")
        suffix = "_total" if kind == "counter" and not name.endswith("_total") else ""
        for labels, value in samples:
            text = ",".join(f'{key}="{word}"' for key, word in {"model_name": settings.model, **labels}.items())
            lines.append(f"{name}{suffix}{{{text}}} {value:g}")

    def each(value: str) -> Mapping[str, str]:
        return {"engine": value}

    numbered = [(each(str(number)), rank) for number, rank in enumerate(ranks)]
    first = each("0")
    family("vllm:num_requests_running", "gauge", [(label, rank.running) for label, rank in numbered])
    family("vllm:num_requests_waiting", "gauge", [(label, rank.waiting) for label, rank in numbered])
    family("vllm:kv_cache_usage_perc", "gauge", [(label, rank.pool.used / rank.pool.size) for label, rank in numbered])
    external = counts.by_source["external_kv_transfer"]
    for name, number in (
        ("vllm:prompt_tokens", counts.prompt_tokens),
        ("vllm:prompt_tokens_cached", counts.cached_tokens),
        ("vllm:generation_tokens", counts.answer_tokens),
        ("vllm:prefix_cache_queries", counts.prompt_tokens),
        ("vllm:prefix_cache_hits", counts.by_source["local_cache_hit"]),
        ("vllm:external_prefix_cache_queries", counts.prompt_tokens),
        ("vllm:external_prefix_cache_hits", external),
        ("vllm:num_preemptions", 0),
    ):
        family(name, "counter", [(first, number)])
    by_source = [({**first, "source": source}, float(number)) for source, number in counts.by_source.items()]
    family("vllm:prompt_tokens_by_source", "counter", by_source)
    by_reason: list[tuple[Mapping[str, str], float]] = [
        ({**first, "finished_reason": reason}, float(counts.finished[reason])) for reason in ("stop", "length", "abort")
    ]
    family("vllm:request_success", "counter", by_reason)
    moves = [fabric.moves.get(rank.engine_id, (0, 0)) for rank in ranks]
    expired = sum(fabric.expired.get(rank.engine_id, 0) for rank in ranks)
    failures = sum(fabric.failures.get(rank.engine_id, 0) for rank in ranks)
    count, size = sum(move[0] for move in moves), sum(move[1] for move in moves)
    for name, total in (("vllm:nixl_bytes_transferred", size), ("vllm:nixl_xfer_time_seconds", 0.0)):
        lines.append(f"# HELP {name} of a fake engine")
        lines.append(f"# TYPE {name} histogram")
        label = f'model_name="{settings.model}",engine="0"'
        lines.append(f'{name}_bucket{{{label},le="+Inf"}} {count:g}')
        lines.append(f"{name}_count{{{label}}} {count:g}")
        lines.append(f"{name}_sum{{{label}}} {total:g}")
    family("vllm:nixl_num_failed_transfers", "counter", [(first, failures)])
    family("vllm:nixl_num_failed_notifications", "counter", [(first, 0)])
    family("vllm:nixl_num_kv_expired_reqs", "counter", [(first, expired)])
    return ("\n".join(lines) + "\n").encode()
