"""Decoder layers that share a graph, and operations that find out when they run what their graph doesn't know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from baton.engine.static import layers, ops  # noqa: E402
from baton.engine.static.shop import Shop  # noqa: E402
from baton.engine.static.store import Store  # noqa: E402

WIDTH = 8


class Attention(torch.nn.Module):
    """As much of vLLM's as is looked at."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.layer_name = name


class Layer(torch.nn.Module):
    """A decoder layer; *factor* is built into its graph."""

    def __init__(self, number: int, factor: float = 2.0, begins: float = 0.0) -> None:
        super().__init__()
        self.attn = Attention(f"model.layers.{number}.attn")
        self.linear = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.factor, self.begins = factor, begins

    def forward(self, positions: Any, hidden_states: Any, residual: Any) -> Any:
        residual = hidden_states + self.begins if residual is None else hidden_states + residual
        return self.linear(residual) * self.factor + positions.unsqueeze(1), residual


class Model(torch.nn.Module):
    def __init__(self, *made: Layer) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(made)

    def forward(self, positions: Any, hidden_states: Any) -> Any:
        residual = None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        return hidden_states + residual


@pytest.fixture(autouse=True)
def attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "Attention", Attention)


def kinds(model: Any, folder: Path) -> list[str]:
    with torch.inference_mode():
        found = layers.layers_of(model, Shop(model, {}, Store(folder)))
        assert found is not None
        return found._alike(torch.arange(3), torch.randn(3, WIDTH))


def test_layers_with_other_weights_share_a_graph_also_the_first(tmp_path: Path) -> None:
    model = Model(Layer(0), Layer(1), Layer(2))
    assert len(set(kinds(model, tmp_path))) == 1
    # What was found is found again.
    assert kinds(model, tmp_path) == kinds(Model(Layer(0), Layer(1), Layer(2)), tmp_path)


def test_a_layer_that_computes_something_else_has_a_graph_of_its_own(tmp_path: Path) -> None:
    first, second, third, fourth = kinds(Model(Layer(0), Layer(1), Layer(2, factor=3.0), Layer(3)), tmp_path)
    assert first == second == fourth != third


def test_a_first_layer_for_which_no_residual_is_not_zeros_begins_in_a_graph_of_its_own(tmp_path: Path) -> None:
    assert kinds(Model(Layer(0, begins=1.0), Layer(1), Layer(2)), tmp_path)[0] == layers.BEGINS


def test_layers_that_are_called_in_another_way_are_left_in_one_graph_of_the_whole_model(tmp_path: Path) -> None:
    class Other(Layer):
        def forward(self, hidden_states: Any, positions: Any) -> Any:  # type: ignore[override]
            return hidden_states

    model = Model(Other(0), Other(1))
    assert layers.layers_of(model, Shop(model, {}, Store(tmp_path))) is None


@pytest.mark.e2e
@pytest.mark.parametrize("begins", [0.0, 1.0])
def test_a_model_computes_by_its_layers_graphs_what_it_computes_without(begins: float, tmp_path: Path) -> None:
    model = Model(Layer(0, begins=begins), Layer(1), Layer(2))
    positions, hidden = torch.arange(4), torch.randn(4, WIDTH)
    with torch.inference_mode():
        expected, others = model(positions, hidden), model(positions[:3], hidden[:3])
        shop = Shop(model, {}, Store(tmp_path))
        found = layers.layers_of(model, shop)
        assert found is not None
        found.make(positions, hidden)
        found.install()
        assert shop.counts.compiled == (2 if begins else 1)
        with ops.step_of(4):
            assert torch.allclose(model(positions, hidden), expected, atol=1e-5)
            assert ops.now.layer == "model.layers.2.attn"
            # A size without a graph, and below what is no step of a bucket.
            assert torch.equal(model(positions[:3], hidden[:3]), others)
        ops.now.layer = ""
        assert torch.equal(model(positions, hidden), expected)
        assert ops.now.layer == ""


def test_matrix_products_leave_out_the_rows_that_fill_a_step_up() -> None:
    from vllm import _custom_ops

    weight, x = torch.randn(24, 16), torch.randn(5, 16)
    handler = _custom_ops.create_onednn_mm(weight.t(), 32)

    def product() -> Any:
        made = torch.full((5, 24), float("nan"))
        torch.ops.baton.linear(made, x, None, handler.handler_tensor)
        return made

    expected = _custom_ops.onednn_mm(handler, x[:3], None)
    with ops.step_of(3):
        made = product()
    assert torch.equal(made[:3], expected)
    assert torch.equal(made[3:], torch.zeros(2, 24))
    assert torch.allclose(product(), x @ weight.t(), atol=1e-4)
