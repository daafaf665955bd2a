"""Whether a model's attention heads can be shared out among tensor parallel ranks, known before anything is loaded.

Pure: a model's config.json and flags in, sentences out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.launch.commands import flag_value
from baton.numbers import decimal

CPU_BLOCK = 32
"""Tokens: attention on CPU takes blocks of a multiple of it (vllm 0.32, v1/attention/backends/cpu_attn.py)."""


MOST_HEADS = 1 << 16
"""More is a mistake in a config, and is left to vLLM."""


def heads_problem(config: Mapping[str, Any], ranks: int) -> str | None:
    """Why the heads of a model cannot be shared out among *ranks*, or None.

    Attention heads are split evenly. Key-value heads are split evenly, or each is held by the same number of ranks;
    models with multi-head latent attention have none to split.

    Args:
        config: as :func:`baton.launch.model_config.read_config` gives it; what it does not say is not checked.
        ranks: the tensor parallel size.
    """
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or not 0 < heads <= MOST_HEADS or ranks <= 1:
        return None
    if heads % ranks:
        fits = [size for size in range(1, heads + 1) if not heads % size and _kv_problem(config, heads, size) is None]
        return (
            f"--tensor-parallel-size {ranks} does not divide the model's {heads} attention heads: "
            f"sizes that fit are {', '.join(map(str, fits))}"
        )
    return _kv_problem(config, heads, ranks)


def _kv_problem(config: Mapping[str, Any], heads: int, ranks: int) -> str | None:
    kv_heads = config.get("num_key_value_heads", heads)
    if config.get("kv_lora_rank") or not isinstance(kv_heads, int) or kv_heads < 1:
        return None
    if kv_heads % ranks and ranks % kv_heads:
        return (
            f"--tensor-parallel-size {ranks} and the model's {kv_heads} key-value heads: one must be a multiple "
            "of the other, so that ranks hold as many heads each or heads are held by as many ranks each"
        )
    return None


def sizes_problem(prefill: int, decode: int) -> str | None:
    """Why prefill servers of one tensor parallel size cannot hand over to decode servers of the other, or None."""
    if max(prefill, decode) % min(prefill, decode):
        return (
            f"prefill servers with --tensor-parallel-size {prefill} and decode servers with {decode}: one must be a "
            "multiple of the other, so that each rank knows whose heads it reads"
        )
    return None


def block_problem(args: Sequence[str]) -> str | None:
    """Why an engine on CPU would refuse its `--block-size`, or None."""
    text = flag_value(args, "--block-size")
    tokens = decimal(text)
    if tokens is None or (tokens > 0 and not tokens % CPU_BLOCK):
        return None
    return f"--block-size {text}: attention on CPU takes multiples of {CPU_BLOCK} tokens; drop it or give {CPU_BLOCK}"
