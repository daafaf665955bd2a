"""Whether a prefill and a decode server can hand over to each other, by what both say of themselves. Pure.

vLLM compares a hash of the same values at the first transfer, and can only say that something differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.cluster import TransferMode

About = Mapping[str, Any]
"""What an engine said at ``GET /baton/engine``."""


def differences(prefill: tuple[str, About], decode: tuple[str, About], mode: TransferMode | None) -> list[str]:
    """What keeps the two apart, each in words that name both values; empty when nothing is known to.

    Args:
        prefill, decode: name and what it says of itself.
        mode: who moves the KV cache.
    """
    (p, ours), (d, theirs) = prefill, decode
    one, other = ours.get("compatibility"), theirs.get("compatibility")
    found: list[str] = []
    if isinstance(one, dict) and isinstance(other, dict):
        found = [f"{key}: {p} {one[key]}, {d} {other[key]}" for key in one if key in other and one[key] != other[key]]
    sizes = [_number(about, "block_size") for about in (ours, theirs)]
    # On CPU vLLM (0.32) takes blocks of another size and answers with garbage.
    equal = "cpu" in (ours.get("device"), theirs.get("device"))
    equal |= bool(ours.get("bidirectional") and theirs.get("bidirectional"))
    if None not in sizes and not _blocks_fit(sizes[0] or 1, sizes[1] or 1, mode, equal):
        found.append(f"block_size: {p} {sizes[0]}, {d} {sizes[1]}")
    ranks = [_number(about, "tp_size") for about in (ours, theirs)]
    if None not in ranks and max(ranks) % min(ranks):  # type: ignore[type-var, operator]
        found.append(f"tp_size: {p} {ranks[0]}, {d} {ranks[1]}, of which neither divides the other")
    return found


def _blocks_fit(prefill: int, decode: int, mode: TransferMode | None, equal: bool) -> bool:
    """Whoever asks for the other's layout must have blocks that are whole numbers of the other's (vllm 0.32,
    kv_connector/utils.py, ``block_size_ratio``): D when it reads, P when it writes, both when turns go back."""
    asks, answers = (prefill, decode) if mode is TransferMode.WRITE else (decode, prefill)
    return asks == answers if equal else asks % answers == 0


def _number(about: About, key: str) -> int | None:
    value = about.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
