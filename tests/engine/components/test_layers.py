"""The layers on real gloo groups of processes: each rank gets what tensor parallelism alone would give it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from baton.engine.components.config import ComponentSizes
from baton.engine.components.groups import Layout

HIDDEN, HEAD, HEADS, INTERMEDIATE, VOCABULARY = 16, 4, 8, 32, 130
KV_HEADS = (8, 4, 2, 1)


@dataclass(frozen=True)
class Shape:
    """A decode server all of whose components are shared by *size* replicas, in a step with *rows* in each."""

    layout: Layout
    size: int
    rows: tuple[int, ...]

    @property
    def ranks(self) -> range:
        return range(self.layout.tensor * self.layout.data)

    def replica(self, rank: int) -> int:
        return self.layout.replica(rank)

    def position(self, rank: int) -> int:
        return rank % self.layout.tensor

    def own(self, rank: int, width: int = HIDDEN, *, more: int = 0) -> torch.Tensor:
        """The rows of a rank's replica, the same on each of its ranks."""
        chance = torch.Generator().manual_seed(self.replica(rank) * 100 + width)
        return torch.randn(self.rows[self.replica(rank)] + more, width, generator=chance)

    def tokens(self, rank: int) -> torch.Tensor:
        replica = self.replica(rank)
        ids = [(37 * replica + 29 * each) % VOCABULARY for each in range(self.rows[replica])]
        return torch.tensor(ids, dtype=torch.int64)

    def times(self, rank: int) -> int:
        """How often a replica computes logits in a step: the first one as when it gives logprobs of a prompt."""
        return 3 if self.replica(rank) == 0 else int(self.rows[self.replica(rank)] > 0)


SHAPES = {
    "dp2-tp1": Shape(Layout(1, 2), 2, (3, 1)),
    "dp2-tp2": Shape(Layout(2, 2), 2, (1, 4)),
    "dp4-in-two-blocks": Shape(Layout(1, 4), 2, (2, 1, 1, 3)),
    "dp4-and-an-empty-rank": Shape(Layout(1, 4), 4, (1, 1, 5, 0)),
    "nothing-shared": Shape(Layout(1, 2), 1, (2, 3)),
}

Made = dict[str, Any]


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shape, list[Made]]:
    """What the layers gave on each rank, in processes of their own."""
    import vllm.model_executor.layers.logits_processor  # noqa: F401 (once, for all of them)

    folder = tmp_path_factory.mktemp("ranks")
    shape = request.param
    processes.start_processes(one_rank, (shape, folder), nprocs=len(shape.ranks), start_method="fork")
    return shape, [torch.load(folder / f"{rank}.pt") for rank in shape.ranks]


def one_rank(rank: int, shape: Shape, folder: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import override_forward_context

    from baton.engine.components import columns, layers

    torch.set_num_threads(1)
    with set_current_vllm_config(VllmConfig()), torch.inference_mode():
        init_distributed_environment(len(shape.ranks), rank, f"file://{folder}/store", rank, "gloo")
        initialize_model_parallel(shape.layout.tensor, backend="gloo")
        columns.install(columns.make(ComponentSizes(*[shape.size] * 4), shape.layout))
        layers.register()
        step: Any = SimpleNamespace(dp_metadata=SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor(shape.rows)))
        with override_forward_context(step):
            made = {
                "attention": {kv_heads: attention(rank, shape, kv_heads) for kv_heads in KV_HEADS},
                "mlp": mlp(rank, shape),
                "embedding": embedding(rank, shape),
            }
        # As vLLM does it: outside of the forward pass.
        made["logits"] = logits(rank, shape)
        made["bytes"] = columns.shared().weight_bytes
    torch.save(made, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def attention(rank: int, shape: Shape, kv_heads: int) -> list[torch.Tensor]:
    from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear

    w = weights(kv_heads)
    qkv = QKVParallelLinear(HIDDEN, HEAD, HEADS, kv_heads, bias=True, prefix="model.layers.0.self_attn.qkv_proj")
    load(qkv, {name: w[name] for name in "qkv"}, {name: w[f"{name}_bias"] for name in "qkv"})
    out = RowParallelLinear(HEADS * HEAD, HIDDEN, bias=True, prefix="model.layers.0.self_attn.o_proj")
    load(out, {None: w["o"]}, {None: w["o_bias"]})
    heads = shape.own(rank, HEADS * HEAD).chunk(shape.layout.tensor, 1)[shape.position(rank)]
    return [qkv(shape.own(rank))[0], out(heads)[0]]


def mlp(rank: int, shape: Shape) -> torch.Tensor:
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear, RowParallelLinear

    w = weights()
    both = MergedColumnParallelLinear(HIDDEN, [INTERMEDIATE] * 2, bias=False, prefix="model.layers.0.mlp.gate_up_proj")
    load(both, {0: w["gate"], 1: w["up"]})
    down = RowParallelLinear(INTERMEDIATE, HIDDEN, bias=False, prefix="model.layers.0.mlp.down_proj")
    load(down, {None: w["down"]})
    gate, up = both(shape.own(rank))[0].chunk(2, 1)
    made: torch.Tensor = down(torch.nn.functional.silu(gate) * up)[0]
    return made


def embedding(rank: int, shape: Shape) -> torch.Tensor:
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    words = load(VocabParallelEmbedding(VOCABULARY, HIDDEN), {None: weights()["words"]})
    found: torch.Tensor = words(shape.tokens(rank))
    return found


def logits(rank: int, shape: Shape) -> list[torch.Tensor | None]:
    """Of two steps."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from baton.engine.components.columns import shared

    head = load(ParallelLMHead(VOCABULARY, HIDDEN), {None: weights()["words"]})
    processor: Any = LogitsProcessor(VOCABULARY)
    rounds = shared().rounds
    if rounds is not None:
        rounds.comes_again = lambda: shape.replica(rank) == 0
    made: list[torch.Tensor | None] = []
    for _ in range(2):
        if rounds is not None:
            rounds.start()
        made += [processor(head, shape.own(rank, more=each)) for each in range(shape.times(rank))]
        processor.finish(head, torch.empty(0, HIDDEN))
    return made


@functools.cache
def weights(kv_heads: int = 4) -> dict[str, torch.Tensor]:
    """The whole model's, the same on all ranks."""
    chance = torch.Generator().manual_seed(3)
    kv = kv_heads * HEAD
    shapes = {
        **{"q": (HEADS * HEAD, HIDDEN), "k": (kv, HIDDEN), "v": (kv, HIDDEN), "o": (HIDDEN, HEADS * HEAD)},
        **{"q_bias": (HEADS * HEAD,), "k_bias": (kv,), "v_bias": (kv,), "o_bias": (HIDDEN,)},
        **{"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)},
        "words": (VOCABULARY, HIDDEN),
    }
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


def load(layer: Any, parts: dict[Any, torch.Tensor], biases: dict[Any, torch.Tensor] | None = None) -> Any:
    """Load whole matrices into a rank's *layer* as vLLM does it, by the name of the part (None: there is one)."""
    for parameter, given in ((layer.weight, parts), (getattr(layer, "bias", None), biases or {})):
        for name, whole in given.items():
            parameter.weight_loader(parameter, whole, *([] if name is None else [name]))
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def close(made: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(made, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kv_heads", KV_HEADS)
def test_attention_gets_its_own_heads_for_its_own_rows(ran: tuple[Shape, list[Made]], kv_heads: int) -> None:
    shape, made = ran
    w = weights(kv_heads)
    tensor = shape.layout.tensor
    for rank in shape.ranks:
        qkv, output = made[rank]["attention"][kv_heads]
        # Ranks of a replica hold key-value heads each, or the same one.
        kv_parts = min(tensor, kv_heads)
        parts = {"q": (tensor, shape.position(rank)), "k": (kv_parts, shape.position(rank) * kv_parts // tensor)}
        parts["v"] = parts["k"]
        expected = [
            shape.own(rank) @ w[name].chunk(count)[part].T + w[f"{name}_bias"].chunk(count)[part]
            for name, (count, part) in parts.items()
        ]
        close(qkv, torch.cat(expected, 1))
        close(output, shape.own(rank, HEADS * HEAD) @ w["o"].T + w["o_bias"])


def test_an_mlp_is_the_whole_one_for_its_own_rows(ran: tuple[Shape, list[Made]]) -> None:
    shape, made = ran
    w = weights()
    for rank in shape.ranks:
        own = shape.own(rank)
        close(made[rank]["mlp"], (torch.nn.functional.silu(own @ w["gate"].T) * (own @ w["up"].T)) @ w["down"].T)


def test_an_embedding_finds_each_token(ran: tuple[Shape, list[Made]]) -> None:
    shape, made = ran
    for rank in shape.ranks:
        close(made[rank]["embedding"], weights()["words"][shape.tokens(rank)])


def test_logits_are_over_the_whole_vocabulary_however_often_a_replica_computes_them(
    ran: tuple[Shape, list[Made]],
) -> None:
    shape, made = ran
    for rank in shape.ranks:
        asked = [*range(shape.times(rank))] * 2
        assert len(made[rank]["logits"]) == len(asked)
        for more, given in zip(asked, made[rank]["logits"], strict=True):
            # vLLM's other ranks of a replica need none.
            if shape.position(rank) == 0:
                close(given, shape.own(rank, more=more) @ weights()["words"].T)


def test_each_rank_holds_its_part_of_the_weights(ran: tuple[Shape, list[Made]]) -> None:
    shape, made = ran
    parts = shape.layout.tensor * shape.size
    # In float32; 130 words are padded to 192.
    words = 4 * 192 * HIDDEN // parts
    kv = sum(2 * max(kv_heads // parts, 1) * HEAD * (HIDDEN + 1) for kv_heads in KV_HEADS)
    queries = len(KV_HEADS) * (HEADS * HEAD // parts * (HIDDEN + 1) + HIDDEN * HEADS * HEAD // parts + HIDDEN)
    expected = {
        "attention": 4 * (kv + queries),
        "mlp": 4 * 3 * HIDDEN * INTERMEDIATE // parts,
        "embedding": words,
        "lm_head": words,
    }
    assert [each["bytes"] for each in made] == [expected] * len(shape.ranks)
