"""Draws of seeded requests whose prompt is computed in chunks, on CPU: taken back, and nobody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from baton.engine.seeds import has_offset, with_states  # noqa: E402
from baton.engine.workarounds import HookGone  # noqa: E402


class Stock:
    """As much of vLLM's runner as is looked at: draws for all, and takes those of discard_request_mask back."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(generators={place: torch.Generator().manual_seed(7) for place in (0, 2)})
        self.discard_request_mask = SimpleNamespace(np=[False] * 4)

    def _sample(self) -> dict[int, float]:
        return {place: torch.rand(1, generator=each).item() for place, each in self.input_batch.generators.items()}

    def _bookkeeping_sync(self) -> None:
        for place, discarded in enumerate(self.discard_request_mask.np):
            generator = self.input_batch.generators.get(place)
            if discarded and generator is not None:
                generator.set_offset(generator.get_offset() - 4)


def step(runner: Any, *discarded: int) -> dict[int, float]:
    runner.discard_request_mask.np = [place in discarded for place in range(4)]
    made: dict[int, float] = runner._sample()
    runner._bookkeeping_sync()
    return made


def test_torch_cannot_take_a_draw_back_on_cpu_as_vllm_does_it() -> None:
    assert not has_offset()
    with pytest.raises(RuntimeError):
        step(Stock(), 0)


def test_a_draw_for_a_chunk_is_made_again_and_the_others_go_on() -> None:
    first, second = step(Stock()), None
    runner = with_states(Stock)()
    for _ in range(3):
        chunk = step(runner, 0, 1)
        assert chunk[0] == first[0]
        assert second is None or chunk[2] != second
        second = chunk[2]
    assert set(runner.input_batch.generators) == {0, 2}
    done = step(runner)
    assert done[0] == first[0]
    assert step(runner)[0] != first[0]


def test_bookkeeping_without_a_draw_takes_nothing_back() -> None:
    """Static shapes sample in a graph, without generators, and don't ask vLLM to."""
    runner = with_states(Stock)()
    step(runner, 0)
    made = runner._sample()
    runner.discard_request_mask.np = [False] * 4
    runner._bookkeeping_sync()
    before = runner.input_batch.generators[0].get_state()
    runner._bookkeeping_sync()
    assert torch.equal(runner.input_batch.generators[0].get_state(), before)
    assert made[0] == step(Stock())[0]


def test_a_hook_that_is_gone_is_named() -> None:
    class Other(Stock):
        _sample = None  # type: ignore[assignment]

        def _bookkeeping_sync(self) -> None: ...

    with pytest.raises(HookGone, match="discard_request_mask is gone"):
        with_states(Other)
    with pytest.raises(HookGone, match="_sample is gone"):
        with_states(type("Empty", (), {}))
