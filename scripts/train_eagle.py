"""Train the fixture of tests/e2e/test_eagle.py: a tiny target and an Eagle3 draft for it, in two minutes on one core.

The text is random letters that repeat after 64: what comes next stands in the prompt, one period back. Target and draft
can only know it by attention to the prompt, so a draft whose KV cache is wrong is caught by its acceptance.

    python scripts/train_eagle.py tests/e2e/eagle
    python scripts/train_eagle.py --experts tests/e2e/eagle_experts

Heads that look one period back are set by hand, for to find them by training takes most of the time; what to make of
what they see is trained. The same seed on the same machine gives the same weights. Not a recipe for real drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (everybody's name for it)

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.e2e.tiny import VOCABULARY, byte_tokenizer

SEED = 11
LETTERS = range(10, 90)
"""Token ids of printable letters."""

PERIOD = 64

HIDDEN = 128
HEAD = 32
MAX_TOKENS = 512
AUX_LAYERS = (1, 2, 3)
"""The target's hidden states that the draft sees: after this many layers."""

DRAFT_STEPS = 3
"""Tokens drafted in a row in training, as in the test."""


def periodic(rows: int, length: int, chance: torch.Generator) -> Tensor:
    """Token ids [rows, length] that repeat after :data:`PERIOD`."""
    once = torch.randint(LETTERS.start, LETTERS.stop, (rows, PERIOD), generator=chance)
    return once.repeat(1, length // PERIOD + 1)[:, :length]


def new_target(experts: bool) -> Any:
    """A model of four layers that already looks one period back in its first, with *experts* or dense."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 4,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
        "max_position_embeddings": MAX_TOKENS,
        "tie_word_embeddings": False,
        "initializer_range": HIDDEN**-0.5,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if experts:
        routed = {"moe_intermediate_size": HIDDEN // 2, "num_experts": 4, "num_experts_per_tok": 2}
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **routed, norm_topk_prob=True))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    attention = model.model.layers[0].self_attn
    look_back(attention.q_proj, attention.k_proj, 2)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0
        if experts:
            # This attention normalises queries and keys: as sharp as without.
            attention.q_norm.weight.fill_(4.0)
            attention.k_norm.weight.fill_(4.0)
    return model


def train_target(model: Any, plan: list[tuple[int, int, int]], chance: torch.Generator) -> Any:
    """*model*, going on with what it saw one period ago. *plan*: steps, rows and length of each stage."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step, tokens, rate in batches(plan, chance):
        logits, wanted = model(tokens[:, :-1]).logits[:, PERIOD - 1 :], tokens[:, PERIOD:]
        loss = F.cross_entropy(logits.mT, wanted)
        learn(optimizer, loss, rate, model)
        if step % 25 == 0:
            right = (logits.argmax(-1) == wanted).float().mean()
            say(f"target step {step}: loss {loss:.3f}, right {right:.3f}")
    return model.eval()


def turn() -> Tensor:
    """What rotary embedding turns each pair of a head's components by, a position: radians [HEAD / 2], base 10000."""
    return 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)


def look_back(q_proj: nn.Linear, k_proj: nn.Linear, heads: int) -> None:
    """Let the query heads of the first KV head attend to where the next token stood one period ago.

    Their queries and keys are made from the first component of the input alone, which all embeddings share: rotated by
    their positions, they agree most where the key is *PERIOD - 1* positions back.
    """
    angles = turn() * (PERIOD - 1)
    with torch.no_grad():
        q_proj.weight[: heads * HEAD] = 0.0
        k_proj.weight[:HEAD] = 0.0
        for head in range(heads):
            q_proj.weight[head * HEAD : head * HEAD + HEAD // 2, 0] = 1.0
        k_proj.weight[:HEAD, 0] = torch.cat([angles.cos(), angles.sin()])


class Draft(nn.Module):
    """One decoder layer on [embedding of the next token, mix of the target's hidden states]; named as saved."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        kv = config.num_key_value_heads * HEAD
        self.fc = linear(len(AUX_LAYERS) * HIDDEN, HIDDEN)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(HIDDEN, config.rms_norm_eps),
                "hidden_norm": nn.RMSNorm(HIDDEN, config.rms_norm_eps),
                "post_attention_layernorm": nn.RMSNorm(HIDDEN, config.rms_norm_eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * HIDDEN, HIDDEN),
                        "k_proj": linear(2 * HIDDEN, kv),
                        "v_proj": linear(2 * HIDDEN, kv),
                        "o_proj": linear(HIDDEN, HIDDEN),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(HIDDEN, 2 * HIDDEN),
                        "up_proj": linear(HIDDEN, 2 * HIDDEN),
                        "down_proj": linear(2 * HIDDEN, HIDDEN),
                    }
                ),
            }
        )
        attention = self.midlayer["self_attn"]
        look_back(attention["q_proj"], attention["k_proj"], config.num_attention_heads // config.num_key_value_heads)
        self.norm = nn.RMSNorm(HIDDEN, config.rms_norm_eps)
        self.lm_head = linear(HIDDEN, config.vocab_size)

    def heads(self, name: str, x: Tensor) -> Tensor:
        """Projected by *name*: [rows, heads, length, HEAD], KV heads repeated for their query heads."""
        made = self.midlayer["self_attn"][name](x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
        return made.repeat_interleave(self.config.num_attention_heads // made.shape[1], dim=1)

    def forward(self, embedded: list[Tensor], hidden: Tensor) -> list[Tensor]:
        """Logits of each drafted token: [rows, length, vocabulary] a step.

        From each position t the draft goes *len(embedded)* steps: step s stands at position t + s, takes the embedding
        of token t + s + 1 and, after the first, its own output instead of the target's hidden states. It attends to the
        first steps up to t, and to its own steps since.
        """
        layer, length = self.midlayer, hidden.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        state, logits, keys, values = hidden, [], [], []
        for step, embeds in enumerate(embedded):
            x = torch.cat([layer["input_layernorm"](embeds), layer["hidden_norm"](state)], -1)
            q, k = (rotated(self.heads(name, x), step) for name in ("q_proj", "k_proj"))
            keys.append(k)
            values.append(self.heads("v_proj", x))
            scores = [(q @ keys[0].mT).masked_fill(~causal, -torch.inf)]
            scores += [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            weights = (torch.cat(scores, -1) / HEAD**0.5).softmax(-1)
            mixed = weights[..., :length] @ values[0]
            for own, value in enumerate(values[1:]):
                mixed = mixed + weights[..., length + own, None] * value
            state = state + layer["self_attn"]["o_proj"](mixed.transpose(1, 2).flatten(2))
            y, mlp = layer["post_attention_layernorm"](state), layer["mlp"]
            state = state + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
            logits.append(self.lm_head(self.norm(state)))
        return logits


def linear(inputs: int, outputs: int) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(made.weight, std=inputs**-0.5)
    return made


def rotated(x: Tensor, first: int) -> Tensor:
    """Rotary embedding (halves, base 10000) of [.., length, HEAD], the first row at position *first*."""
    angles = torch.arange(first, first + x.shape[-2])[:, None] * turn()
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


def train_draft(target: Any, plan: list[tuple[int, int, int]], chance: torch.Generator) -> Draft:
    """A draft that says what *target* will say, some tokens ahead; its embedding is the target's."""
    draft = Draft(target.config)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step, tokens, rate in batches(plan, chance):
        with torch.no_grad():
            seen = target(tokens, output_hidden_states=True)
            hidden = torch.cat([seen.hidden_states[layer] for layer in AUX_LAYERS], -1)
            embedded, said = target.model.embed_tokens(tokens), seen.logits.argmax(-1)
        length = tokens.shape[1] - DRAFT_STEPS - 1
        steps = range(1, DRAFT_STEPS + 1)
        logits = draft([embedded[:, s : s + length] for s in steps], draft.fc(hidden[:, :length]))
        loss, right = torch.zeros(()), []
        for s, made in zip(steps, logits, strict=True):
            # Step s at position t is for token t + s + 1, which the target says at position t + s.
            here, wanted = made[:, PERIOD:], said[:, PERIOD + s : s + length]
            loss = loss + F.cross_entropy(here.mT, wanted)
            right.append((here.argmax(-1) == wanted).float().mean())
        learn(optimizer, loss, rate, draft)
        if step % 25 == 0:
            say(f"draft step {step}: loss {loss:.3f}, right {', '.join(f'{share:.3f}' for share in right)}")
    return draft.eval()


def batches(plan: list[tuple[int, int, int]], chance: torch.Generator) -> Any:
    """(step, batch, learning rate's factor): warm at 50 steps, then down to a tenth."""
    total, step = sum(steps for steps, _, _ in plan), 0
    for steps, rows, length in plan:
        for _ in range(steps):
            step += 1
            yield step, periodic(rows, length, chance), min(1.0, step / 50) * max(0.1, 1 - step / total)


def learn(optimizer: torch.optim.Optimizer, loss: Tensor, rate: float, model: nn.Module) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 2e-3 * rate
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def save(target: Any, draft: Draft, folder: Path) -> None:
    """Both in bfloat16, as vLLM loads them: folder/target and folder/draft."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    target.to(torch.bfloat16).save_pretrained(folder / "target")
    byte_tokenizer(folder / "target")
    path = folder / "draft"
    path.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in draft.named_parameters()}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    shape = LlamaConfig().to_dict().keys() & target.config.to_dict().keys()
    config = {
        **{key: value for key, value in target.config.to_diff_dict().items() if key in shape},
        "model_type": "llama",
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        "dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def say(line: str) -> None:
    print(f"{time.monotonic() - STARTED:6.0f} s  {line}", flush=True)


STARTED = time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the Eagle3 fixture of the tests.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", action="store_true", help="a target with a mixture of experts, not a dense one")
    parser.add_argument("--quick", action="store_true", help="ten steps of each, to try the code")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    chance = torch.Generator().manual_seed(SEED)
    target_plan = [(150, 8, 128), (50, 8, 256)]
    draft_plan = [(150, 8, 136), (75, 8, 256)]
    if args.quick:
        target_plan, draft_plan = [(10, 8, 96)], [(10, 8, 96)]
    target = train_target(new_target(args.experts), target_plan, chance)
    save(target, train_draft(target, draft_plan, chance), args.folder)
    say("done")


if __name__ == "__main__":
    main()
