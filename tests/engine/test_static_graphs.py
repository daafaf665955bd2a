"""Compiled graphs: what they compute, that they are kept, and that what is damaged is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from baton.engine.static.graphs import Held  # noqa: E402
from baton.engine.static.sampling import greedy_head, random_head  # noqa: E402
from baton.engine.static.shop import Shop  # noqa: E402
from baton.engine.static.store import Store, cpu_of, key_of  # noqa: E402

WIDTH, VOCABULARY = 8, 24


class Handle:
    """As vLLM's handle to packed weights: a number in a tensor that means nothing in another process."""

    def __init__(self, scale: float) -> None:
        self.handler_tensor = torch.tensor(scale)


class Model(torch.nn.Module):
    """A head, and before it a layer whose weight is out of sight in a closure."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layer = torch.nn.Module()
        handle = Handle(float(seed))
        self.layer.cpu_linear = lambda x: x * handle.handler_tensor

    def compute_logits(self, hidden: Any) -> Any:
        return self.head(self.layer.cpu_linear(hidden))


def double(model: Any, x: Any) -> Any:
    return model.compute_logits(x) * 2


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def shop(model: Any, store: Store) -> Shop:
    return Shop(model, {}, store)


@pytest.mark.e2e
def test_a_graph_takes_what_the_model_holds_at_each_call_and_comes_back_from_the_store(store: Store) -> None:
    rows = torch.randn(4, WIDTH)
    with torch.inference_mode():
        first = shop(Model(1), store)
        made = first.make("double", double, [rows])
        assert torch.allclose(made(rows)[0], double(Model(1), rows), atol=1e-5)
        assert (first.counts.compiled, first.counts.loaded) == (1, 0)
        assert list(store.kernels.rglob("*.so.sha256"))
        # Other weights of the same shapes, also those in the closure: the same graph.
        other = Model(2)
        second = shop(other, store)
        assert torch.allclose(second.make("double", double, [rows])(rows)[0], double(other, rows), atol=1e-5)
        assert (second.counts.compiled, second.counts.loaded) == (0, 1)
        # Another size is another graph.
        second.make("double", double, [rows[:2]])
        assert (second.counts.compiled, second.counts.loaded) == (1, 1)


@pytest.mark.e2e
def test_a_damaged_graph_is_made_again(store: Store) -> None:
    rows = torch.randn(3, WIDTH)
    with torch.inference_mode():
        shop(Model(1), store).make("double", double, [rows])
        (kept,) = store.root.glob("*.graph")
        kept.write_bytes(kept.read_bytes()[:-1] + b"x")
        again = shop(Model(1), store)
        assert torch.allclose(again.make("double", double, [rows])(rows)[0], double(Model(1), rows), atol=1e-5)
        assert again.counts.compiled == 1


def test_a_damaged_kernel_is_removed_before_anybody_loads_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open()
    good, bad, unknown = (store.kernels / f"{name}.so" for name in ("good", "bad", "unknown"))
    for kernel in (good, bad):
        kernel.write_bytes(b"code")
    store.write("key", b"graph")
    bad.write_bytes(b"cod")
    unknown.write_bytes(b"another engine is writing it just now")
    Store(tmp_path).open()
    assert (good.exists(), bad.exists(), unknown.exists()) == (True, False, True)
    assert store.read("key") == b"graph"
    assert store.read("other") is None


def test_whatever_a_model_holds_is_named_with_its_shape() -> None:
    names = [name for name, *_ in Held(Model(1)).shapes()]
    assert names == ["head.weight", "layer.cpu_linear[0]"]


class Shared(torch.nn.Module):
    """One module at two places, as vLLM's rotary embedding, and one weight in two modules, as a tied head."""

    def __init__(self) -> None:
        super().__init__()
        rotary = torch.nn.Module()
        rotary.register_buffer("table", torch.ones(WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        for layer in self.layers:
            layer.rotary = rotary
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x) * layer.rotary.table
        return x


def test_what_stands_at_two_places_is_handed_in_at_both_and_is_the_models_own_afterwards() -> None:
    model, rows = Shared(), torch.randn(3, WIDTH)
    held, table, weight = Held(model), model.layers[0].rotary.table, model.layers[0].weight
    expected = model(rows)
    assert [name for name, *_ in held.shapes()] == ["layers.0.weight", "layers.0.rotary.table"]
    with torch.no_grad():
        made = held.bind(Shared.__call__)(2 * weight, torch.full((WIDTH,), 3.0), rows)
    assert torch.allclose(made, 36 * expected, atol=1e-5)
    assert model.layers[0].rotary.table is table
    assert model.layers[0].weight is model.layers[1].weight is weight
    assert torch.equal(model(rows), expected)


def test_a_key_follows_everything_that_it_is_made_of() -> None:
    parts = {"model": "a", "torch": "1", "cpu": "x"}
    keys = {key_of(parts), *(key_of({**parts, name: "other"}) for name in parts)}
    assert len(keys) == 4


def test_of_the_cpu_only_what_code_depends_on_counts() -> None:
    text = "processor\t: 0\nmodel name\t: A\ncpu MHz\t: 1000\nflags\t: avx2\n"
    assert cpu_of(text) == cpu_of(text.replace("1000", "2000")) == "flags\t: avx2\nmodel name\t: A"
    assert cpu_of(text) != cpu_of(text.replace("avx2", "avx512f"))


def test_the_likeliest_token_is_that_of_the_logits() -> None:
    rows, model = torch.randn(5, WIDTH), Model(3)
    assert greedy_head(model, rows).tolist() == model.compute_logits(rows).argmax(-1).tolist()


def test_a_draw_follows_temperature_top_k_and_top_p_of_each_row() -> None:
    torch.manual_seed(0)
    model, draws, width = Model(3), 4000, 6
    hidden = torch.randn(1, WIDTH).expand(draws, WIDTH)
    logits = model.compute_logits(hidden[:1])[0]

    def share(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
        given = torch.full((draws,), temperature), torch.full((draws,), top_k), torch.full((draws,), top_p)
        tokens = random_head(model, hidden, *given, torch.empty(draws, width).exponential_())
        return {int(token): (tokens == token).float().mean().item() for token in tokens.unique()}

    best = logits.argsort(descending=True)
    expected = torch.softmax(logits[best[:3]] / 5.0, 0)
    drawn = share(5.0, 3, 1.0)
    assert set(drawn) == set(best[:3].tolist())
    for token, chance in zip(best[:3].tolist(), expected.tolist(), strict=True):
        assert drawn[token] == pytest.approx(chance, abs=0.04)
    # Just enough of the likeliest to reach top-p.
    assert set(share(5.0, 3, expected[0].item() + 0.01)) == set(best[:2].tolist())
    assert share(5.0, 3, 1e-6) == {int(best[0]): 1.0}
    assert share(0.0, 3, 1.0) == {int(best[0]): 1.0}
    assert share(5.0, 1, 1.0) == {int(best[0]): 1.0}
