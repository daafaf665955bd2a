"""How a fake engine is made: what it may hold and how fast it is. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.cluster import Role, TransferMode

NEVER = math.inf


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One kind of engine. Speeds are those of one rank; infinite ones cost no time.

    Attributes:
        model: the name that it serves.
        mode: who moves the KV cache.
        block_size: tokens a KV block.
        kv_blocks: blocks a rank has.
        max_num_seqs: requests that a rank works on at a time; more wait.
        max_model_len: tokens of prompt and answer together.
        prefill_tokens_per_second: one prompt after the other.
        decode_step_seconds: one token for each running request.
        lease_seconds: how long a prefill server keeps blocks that nobody asks for (``kv_lease_duration``).
        turn_seconds: how long a decode server keeps a turn's (``decoder_kv_blocks_ttl``).
        transfer_bytes_per_second: of one pull or push.
        token_bytes: of the KV cache of one token.
        handshake_seconds: of the first transfer between two ranks.
        prefix_cache: whether a prompt's known start costs no time.
        bidirectional: whether decode servers keep turns.
        connector: whether it has one; without, tickets are ignored and none are given.
        dp_size: data-parallel ranks, each with an engine id and a side channel port of its own.
        baton: whether it answers at ``/baton/engine`` and puts tickets into streams, as engines that Baton started.
    """

    model: str = "sim"
    mode: TransferMode = TransferMode.READ
    block_size: int = 32
    kv_blocks: int = 100_000
    max_num_seqs: int = 256
    max_model_len: int = 32_768
    prefill_tokens_per_second: float = NEVER
    decode_step_seconds: float = 0.0
    lease_seconds: float = 30.0
    turn_seconds: float = 480.0
    transfer_bytes_per_second: float = NEVER
    token_bytes: int = 46_080
    handshake_seconds: float = 0.0
    prefix_cache: bool = False
    bidirectional: bool = False
    connector: bool = True
    dp_size: int = 1
    baton: bool = True

    @property
    def longest(self) -> int:
        """Tokens that one request may have: no more than there are blocks for."""
        return min(self.max_model_len, self.kv_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine of a lab: its name (``P0``, ``D1``), its role, its port (0: any) and how it is made."""

    name: str
    role: Role
    port: int
    settings: EngineSettings
