"""Both sides of Baton's connectors in one process, over real NIXL and without a model, for tests.

A side is a scheduler's and a worker's half of a connector, as an engine has them, and a KV cache of a few blocks.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.ports import free_ports

MODEL = str(Path(__file__).parent / "tiny")
BLOCK, BLOCKS, LAYERS, HEADS, HEAD = 32, 16, 2, 2, 16
SECONDS = 60.0
NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
ASK = {"do_remote_decode": True, "do_remote_prefill": False}


@functools.cache
def base() -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="baton.engine.connector",
        kv_role="kv_both",
        kv_buffer_device="cpu",
    )
    words = {"model": MODEL, "dtype": "float32", "block_size": BLOCK, "max_model_len": 256, "enforce_eager": True}
    made = EngineArgs(**words, skip_tokenizer_init=True, kv_transfer_config=transfer).create_engine_config()
    made.cache_config.kv_cache_layout = "LBHNC"
    return made


def config(engine_id: str, extra: dict[str, Any]) -> Any:
    """One engine's, which takes seconds to make anew."""
    made = copy.deepcopy(base())
    made.kv_transfer_config.engine_id = engine_id
    made.kv_transfer_config.kv_connector_extra_config = {"num_threads": 1, **extra}
    return made


class Side:
    """One engine's connector, and the steps that its scheduler would take."""

    def __init__(self, name: str, mode: str, monkeypatch: pytest.MonkeyPatch, **extra: Any) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from baton.engine.connector import BatonPullScheduler, BatonPullWorker, BatonPushScheduler, BatonPushWorker

        (self.port,) = free_ports(1)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(self.port))
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        made = config(name, extra)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(NAMES, spec)])
        read = mode == "read"
        self.caches = {name: torch.rand((BLOCKS, HEADS, BLOCK, 2 * HEAD)) for name in NAMES}
        with set_current_vllm_config(made):
            self.scheduler: Any = (BatonPullScheduler if read else BatonPushScheduler)(made, name, cache)
            self.worker: Any = (BatonPullWorker if read else BatonPushWorker)(made, name, cache)
            self.worker.register_kv_caches(self.caches)
        self.scheduler.set_xfer_handshake_metadata({(0, 0): self.worker.xfer_handshake_metadata})
        self.sent: set[str] = set()
        self.received: set[str] = set()
        self.failed: set[str] = set()
        self._loading: dict[str, Any] = {}

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()

    def step(self) -> None:
        meta = self.scheduler.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))
        self.worker.start_load_kv(meta)
        found = self.worker.get_transfer_results()
        for name in found.failed_recving & self._loading.keys():
            # vLLM's scheduler ends them before it hears what came of transfers.
            request = self._loading.pop(name)
            request.status = RequestStatus.FINISHED_ERROR
            self.scheduler.request_finished(request, ([],))
        output = KVConnectorOutput(finished_sending=found.finished_sending, finished_recving=found.finished_recving)
        output.failed_recving = found.failed_recving
        self.scheduler.update_connector_output(output)
        self.sent |= output.finished_sending or set()
        self.failed |= found.failed_recving
        self.received |= (output.finished_recving or set()) - found.failed_recving

    def prefill(self, name: str, tokens: Sequence[int], blocks: Sequence[int]) -> dict[str, Any]:
        """Compute a prompt into *blocks*; its ticket."""
        request = request_of(name, tokens, dict(ASK))
        self.scheduler.on_new_request(request)
        self.scheduler.update_state_after_alloc(request, blocks_of(blocks), 0)
        self.step()
        request.num_computed_tokens, request.status = len(tokens), RequestStatus.FINISHED_LENGTH_CAPPED
        delayed, ticket = self.scheduler.request_finished(request, (list(blocks),))
        assert delayed
        self.step()
        made: dict[str, Any] = ticket
        return made

    def load(self, name: str, tokens: Sequence[int], blocks: Sequence[int], ticket: dict[str, Any]) -> Any:
        """Begin to load a prompt's KV cache into *blocks*."""
        request = request_of(name, tokens, {"tp_size": 1, **ticket})
        self.scheduler.on_new_request(request)
        count, waits = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert waits
        self.scheduler.update_state_after_alloc(request, blocks_of(blocks), count)
        self._loading[name] = request
        self.step()
        return request

    def block(self, number: int) -> torch.Tensor:
        return torch.stack([cache[number] for cache in self.caches.values()])


def request_of(name: str, tokens: Sequence[int], ticket: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": ticket})
    return Request(name, list(tokens), sampling, None)


def blocks_of(numbers: Sequence[int]) -> Any:
    block = SimpleNamespace(block_hash=None, is_null=False)
    return SimpleNamespace(blocks=([block] * len(numbers),), get_unhashed_block_ids_all_groups=lambda: (list(numbers),))


def until(condition: Any, *sides: Side) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        for side in sides:
            side.step()


def over(side: Side, name: str, *others: Side) -> bool:
    """Wait for a load's end; whether it went well."""
    until(lambda: name in side.received | side.failed, side, *others)
    return name in side.received


TOKENS, OTHERS = list(range(70)), list(range(100, 170))


def is_write(side: Side) -> bool:
    return bool(side.scheduler._TRANSFER_MODE == "push")
