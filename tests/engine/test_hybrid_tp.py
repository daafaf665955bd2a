"""Which prefill ranks a decode rank reads from and which it only tells, by vLLM's own plan."""

from __future__ import annotations

import json

import pytest

from tests.engine.test_workarounds import in_engine

CODE = """
import json
from baton.engine.hybrid_tp import HybridTopology, check_hooks, spare_ranks
from vllm.distributed.kv_transfer.kv_connector.utils import EngineTransferInfo, TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping
from vllm.v1.kv_cache_interface import FullAttentionSpec

def plan(prefill, decode, rank, kv_heads):
    made = HybridTopology.of(TransferTopology(
        tp_rank=rank, tp_size=decode, block_size=32, engine_id="D", is_mla=False, is_mamba=False,
        total_num_kv_heads=kv_heads, attn_backends=[]))
    made.register_remote_engine("P", EngineTransferInfo(prefill, 32, 1, 1))
    plan = compute_tp_mapping(made, prefill, (FullAttentionSpec,))
    spare = spare_ranks(plan, set(made.handshake_target_ranks(prefill)))
    return list(plan.all_source_ranks), spare, made.is_kv_replicated("P")

check_hooks()
cases = [(2, 1, 0, 1), (4, 1, 0, 2), (4, 2, 1, 2), (2, 1, 0, 4), (2, 2, 1, 1), (1, 2, 1, 1), (2, 4, 3, 1)]
print(json.dumps([plan(*case) for case in cases]))
"""


@pytest.fixture(scope="module")
def plans() -> list[object]:
    found: list[object] = json.loads(in_engine(CODE).splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("number", "reads", "tells", "replicated"),
    [
        (0, [0], [1], False),  # P tp 2, D tp 1, one head
        (1, [0, 2], [1, 3], False),  # P tp 4, D tp 1, two heads
        (2, [2], [3], False),  # P tp 4, rank 1 of D tp 2, two heads
        (3, [0, 1], [], False),  # P tp 2, D tp 1, four heads: as in vLLM
        (4, [1], [], True),  # the same size on both sides: as in vLLM
        (5, [0], [], False),  # P tp 1, D tp 2, one head: as in vLLM
        (6, [1], [], True),  # P tp 2, D tp 4, one head: as in vLLM
    ],
)
def test_each_head_is_read_once_and_all_its_holders_are_told(
    plans: list[object], number: int, reads: list[int], tells: list[int], replicated: bool
) -> None:
    assert plans[number] == [reads, tells, replicated]
