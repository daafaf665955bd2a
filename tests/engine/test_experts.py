"""Experts spread over ranks: each rank computes its own, and the sum over ranks is what one rank computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.engine.experts import local_pairs, mapped
from tests.engine.test_workarounds import in_engine

EXPERTS, WIDTH = 4, 3


class Experts:
    """Experts as vLLM's: each multiplies by its weight; they know only the ids of the weights they hold."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *,
        expert_map: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert expert_map is None
        assert int(topk_ids.max()) < len(w1), "an expert that is not here"
        shares = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        output.copy_((hidden_states.unsqueeze(1) * (w1[topk_ids.long()] * shares).unsqueeze(2)).sum(1))


def computed(experts: Any, ids: torch.Tensor, here: list[int] | None, on_input: bool = False) -> torch.Tensor:
    """What *experts* make of three tokens; *here*: the experts of the rank, None for all without a map."""
    states = torch.arange(9.0).reshape(3, WIDTH) + 1
    weights = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])[:, : ids.shape[1]]
    scales = torch.tensor([1.0, 10.0, 100.0, 1000.0])
    expert_map = None
    if here is not None:
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(len(here), dtype=torch.int32)
        scales = scales[here]
    output = torch.full((3, WIDTH), torch.nan)
    experts().apply(
        output, states, scales, scales, weights, ids, expert_map=expert_map, apply_router_weight_on_input=on_input
    )
    return output


IDS = torch.tensor([[0, 3], [1, 2], [0, 1]], dtype=torch.int32)


@pytest.mark.parametrize("shares", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1, 2, 3]]], ids=str)
def test_the_sum_over_ranks_is_what_one_rank_computes(shares: list[list[int]]) -> None:
    whole = computed(Experts, IDS, None)
    parts = [computed(mapped(Experts), IDS, here) for here in shares]
    assert torch.equal(sum(parts), whole)  # type: ignore[arg-type]


def test_a_rank_without_a_tokens_experts_gives_zeros() -> None:
    made = computed(mapped(Experts), IDS, [2, 3])
    assert made[2].tolist() == [0.0] * WIDTH
    assert not made[:2].eq(0).any()
    nothing = computed(mapped(Experts), torch.zeros(3, 2, dtype=torch.int32), [2, 3])
    assert nothing.tolist() == [[0.0] * WIDTH] * 3


def test_weights_that_are_in_the_input_already_leave_out_what_is_elsewhere_too() -> None:
    ids = IDS[:, :1]
    parts = [computed(mapped(Experts), ids, here, on_input=True) for here in ([0, 1], [2, 3])]
    assert torch.equal(sum(parts), computed(Experts, ids, None, on_input=True))  # type: ignore[arg-type]


def test_without_a_map_nothing_changes() -> None:
    assert torch.equal(computed(mapped(Experts), IDS, None), computed(Experts, IDS, None))


def test_pairs_name_the_experts_of_this_rank_in_the_type_of_the_ids() -> None:
    tokens, places, ids = local_pairs(IDS.long(), torch.tensor([-1, 0, -1, 1], dtype=torch.int32))
    assert (tokens.tolist(), places.tolist(), ids.tolist()) == ([0, 1, 2], [1, 0, 1], [1, 0, 0])
    assert ids.dtype == torch.int64


@pytest.mark.e2e
def test_with_vllms_own_kernel_two_ranks_make_what_one_makes_and_the_gaps_are_still_there() -> None:
    """The most by which the sum differs; and whether vLLM has filled by itself what Baton fills."""
    code = (
        "import torch\n"
        "from vllm.platforms import current_platform as platform; platform.import_kernels()\n"
        "from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight as pack\n"
        "from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator\n"
        "from baton.engine.experts import mapped\n"
        "class Experts:\n"
        "    def apply(self, output, states, w1, w2, weights, ids, *, expert_map):\n"
        "        assert expert_map is None\n"
        "        cpu_fused_moe(output, states, w1, w2, None, None, weights, ids, 'silu', 'vec')\n"
        "torch.manual_seed(1)\n"
        "w1, w2 = torch.randn(8, 128, 64), torch.randn(8, 64, 64)\n"
        "states = torch.randn(9, 64)\n"
        "weights, ids = torch.softmax(torch.randn(9, 8), -1).topk(2)\n"
        "def made(here):\n"
        "    places = torch.full((8,), -1, dtype=torch.int32)\n"
        "    places[here] = torch.arange(len(here), dtype=torch.int32)\n"
        "    output = torch.empty(9, 64)\n"
        "    args = output, states, pack(w1[here].contiguous(), 'vec'), pack(w2[here].contiguous(), 'vec')\n"
        "    mapped(Experts)().apply(*args, weights, ids.int(), expert_map=places)\n"
        "    return output\n"
        "whole = made(list(range(8)))\n"
        "parts = made([0, 1, 2, 3]) + made([4, 5, 6, 7])\n"
        "close = torch.allclose(parts, whole, rtol=1e-5, atol=1e-3)\n"
        "filled = {'all_gatherv', 'reduce_scatterv'} & {*vars(CpuCommunicator)}\n"
        "print(close, platform.get_device_communicator_cls(), *filled)"
    )
    assert in_engine(code) == "True baton.engine.communicator.BatonCpuCommunicator"
