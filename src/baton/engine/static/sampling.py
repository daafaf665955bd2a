"""Sampling inside the graph: head, temperature, top-k, top-p and choice in one; only tokens leave it.

A batch that wants more (logprobs, seeds of its own, penalties, masks, a grammar) is sampled by vLLM from its logits.
"""

from __future__ import annotations

from typing import Any

import torch

from baton.engine.static.buckets import Sampling


def greedy_head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row.

    Args:
        hidden: (rows, hidden size).

    Returns:
        (rows,) of int64.
    """
    return logits_of(model, hidden).argmax(dim=-1)


def random_head(  # noqa: PLR0917 (a graph takes its inputs by place)
    model: Any,
    hidden: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """A token of each row, by its own parameters; temperature 0 takes the likeliest.

    Args:
        hidden: (rows, hidden size).
        temperature, top_p: (rows,) of float32.
        top_k: (rows,) of int64, from 1 to the width of *noise*.
        noise: (rows, largest top-k), exponentially distributed: dividing by it and taking the largest draws a token.

    Returns:
        (rows,) of int64.
    """
    logits = logits_of(model, hidden).float()
    width = noise.shape[1]
    best, tokens = logits.topk(width, dim=-1)
    is_greedy = temperature < 1e-5
    scaled = best / torch.where(is_greedy, torch.ones_like(temperature), temperature).unsqueeze(1)
    beyond = torch.arange(width).unsqueeze(0) >= top_k.unsqueeze(1)
    chances = scaled.masked_fill(beyond, float("-inf")).softmax(dim=-1)
    # A token stays while those before it have not reached top-p; the first always does.
    before = chances.cumsum(dim=-1) - chances
    chances = chances.masked_fill(before >= top_p.unsqueeze(1), 0.0)
    drawn = tokens.gather(1, (chances / noise).argmax(dim=-1, keepdim=True)).squeeze(1)
    return torch.where(is_greedy, logits.argmax(dim=-1), drawn)


def logits_of(model: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The model's own head; by its class, since an instance's may be replaced by ours."""
    return type(model).compute_logits(model, hidden, *args, **kwargs)


def why_not(metadata: Any, rows: int, sampling: Sampling, *, grammar: bool, prompt_logprobs: bool) -> str | None:
    """Why vLLM has to sample this batch, or None.

    Args:
        metadata: vLLM's ``SamplingMetadata`` (0.32, v1/sample/metadata.py).
        rows: requests of the batch.
        grammar: whether one of them has a grammar.
        prompt_logprobs: whether one of them asks for the prompt's.
    """
    wants = {
        "structured output": grammar,
        "logprobs": metadata.max_num_logprobs is not None or bool(metadata.logprob_token_ids) or prompt_logprobs,
        "a seed": bool(metadata.generators),
        "penalties": not metadata.no_penalties,
        "masked tokens": metadata.allowed_token_ids_mask is not None or bool(metadata.bad_words_token_ids),
        "a logits processor": any(_works(each) for each in metadata.logitsprocs.all),
        "a thinking budget": (
            metadata.thinking_budget_state_holder is not None
            and metadata.thinking_budget_state_holder.has_tracked_requests()
        ),
    }
    found = next((what for what, asked in wants.items() if asked), None)
    if found or metadata.all_greedy:
        return found
    if sampling.all_greedy:
        return "a temperature, and on_device_sampling_config says all_greedy"
    top_k = metadata.top_k
    if top_k is None or bool((_of_random(metadata, rows, top_k) > sampling.max_top_k).any()):
        return f"a temperature with no top-k of at most {sampling.max_top_k}"
    return None


def _of_random(metadata: Any, rows: int, values: torch.Tensor) -> torch.Tensor:
    """*values* of those rows that are not greedy."""
    return values[:rows][metadata.temperature[:rows] >= 1e-5]


def _works(processor: Any) -> bool:
    """Whether a logits processor has something to do; vLLM's own always stand in the list (0.32, builtin.py)."""
    known = [getattr(processor, name) for name in ("min_p_count", "biases", "min_toks") if hasattr(processor, name)]
    return bool(known[0]) if known else True
