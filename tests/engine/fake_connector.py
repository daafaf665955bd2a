"""A KV connector for tests: what is to be had elsewhere is said by the request's ticket.

A ticket ``{"do_remote_prefill": True, "tokens": N}`` offers N tokens; without ``tokens`` all of the prompt. Without a
worker (scheduler tests) loads are done when the test says so; a worker takes blocks from :data:`SHELF`, by request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

SHELF: dict[str, Any] = {}
"""(layers, blocks, heads, tokens of a block, 2 x head size): the KV cache of a prompt, as its engine left it. What is
not there fails to come."""


@dataclass
class Loads(KVConnectorMetadata):
    """Block ids to fill, by request."""

    blocks: dict[str, list[int]] = field(default_factory=dict)


class FakeConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.asked: set[str] = set()
        """Requests whose load was started and has not been reported."""
        self._new: dict[str, list[int]] = {}
        self._done: set[str] = set()
        self._failed: set[int] = set()
        self._layers: list[Any] = []

    # scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        ticket = request.kv_transfer_params or {}
        if not ticket.get("do_remote_prefill"):
            return 0, False
        count = ticket.get("tokens", request.num_prompt_tokens) - num_computed_tokens
        return (count, True) if count > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.asked.add(request.request_id)
            self._new[request.request_id] = list(blocks.get_block_ids()[0])
            request.kv_transfer_params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        new, self._new = self._new, {}
        return Loads(new)

    # worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._layers = list(kv_caches.values())

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        loads = self._get_connector_metadata()
        assert isinstance(loads, Loads)
        for name, blocks in loads.blocks.items():
            if name not in SHELF:
                self._failed |= set(blocks)
            for layer, kept in zip(self._layers, SHELF.get(name, ()), strict=name in SHELF):
                layer[blocks] = kept[: len(blocks)]
            self._done.add(name)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        done, self._done = self._done, set()
        return None, done

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, *_: Any, **__: Any) -> None: ...
    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...
    def wait_for_save(self) -> None: ...
