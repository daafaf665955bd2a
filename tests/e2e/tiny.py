"""Tiny models made on the spot: real architectures with random weights, and a tokenizer of single bytes.

Weights at their default scale answer with one letter for ever, which proves nothing: these are scaled until the
answer follows the whole prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 320
"""256 bytes and room for what is special."""

MAX_TOKENS = 1024
SCALE = 4.0


def llama(
    folder: Path, *, layers: int = 4, hidden: int = 256, heads: int = 8, kv_heads: int = 4, seed: int = 7
) -> Path:
    """A LlamaForCausalLM in *folder*, in float32: 4 layers, head size 32, about 3 million weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
    )
    return save(LlamaForCausalLM, config, folder, seed)


def qwen3(folder: Path, *, layers: int = 4, hidden: int = 256, seed: int = 7) -> Path:
    """A Qwen3ForCausalLM in *folder*, in float32: 8 heads, 4 KV heads, one matrix for embedding and LM head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
    )
    return save(Qwen3ForCausalLM, config, folder, seed)


def qwen3_moe(folder: Path, *, layers: int = 4, hidden: int = 256, experts: int = 8, seed: int = 7) -> Path:
    """A Qwen3MoeForCausalLM in *folder*, in float32: 8 heads, 4 KV heads, 2 experts a token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden,
        moe_intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=False,
    )
    return save(Qwen3MoeForCausalLM, config, folder, seed)


def save(architecture: Any, config: Any, folder: Path, seed: int) -> Path:
    """A model of *architecture* with scaled random weights in *folder*, and its tokenizer."""
    import torch

    torch.manual_seed(seed)
    model = architecture(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(SCALE)
    model.save_pretrained(folder)
    byte_tokenizer(folder)
    return folder


def byte_tokenizer(folder: Path) -> None:
    """A tokenizer for which each byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {letter: number for number, letter in enumerate(alphabet)}
    for special in ("<s>", "</s>"):
        words[special] = len(words)
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": MAX_TOKENS,
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
