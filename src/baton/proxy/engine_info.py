"""What an engine is, as far as the other leg must know: how it moves KV caches, and where it is met. Pure.

A Baton engine says it at ``GET /baton/engine``; of a stock one as much is known as its tickets say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from baton.cluster import Role, TransferMode

PATH = b"/baton/engine"
WORDS: Mapping[TransferMode, str] = {TransferMode.READ: "pull", TransferMode.WRITE: "push"}
"""vLLM's word for each of ours."""
_MODES: Mapping[Any, TransferMode] = {word: mode for mode, word in WORDS.items()}

_RANK = re.compile(r"_dp\d+$")

LEASE_SECONDS = 30.0
"""vLLM's own (0.32, nixl/base_scheduler.py, ``kv_lease_duration``), for engines that do not say theirs."""


class BadEngineInfo(ValueError):
    """An answer that says nothing that could be used."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine, from one start to its end.

    Attributes:
        engine_id: new with every start; of all its data-parallel ranks, or of one of them (``..._dp1``).
        transfer_mode: who moves the KV cache.
        side_channel_host, side_channel_port: where NIXL agents meet it; one port a data-parallel rank.
        tp_size, pp_size, dp_size: ranks in tensor, pipeline and data parallelism.
        kv_role: vLLM's word for its role; None when that is unknown.
        bidirectional: whether it keeps a turn's KV cache for the next one.
        lease_seconds: how long it keeps the blocks of a ticket that nobody renews.
    """

    engine_id: str
    transfer_mode: TransferMode
    side_channel_host: str
    side_channel_port: int
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    kv_role: str | None = None
    bidirectional: bool = False
    lease_seconds: float = LEASE_SECONDS

    @classmethod
    def parse(cls, raw: bytes) -> EngineInfo | None:
        """What ``GET /baton/engine`` answered; None for an engine that moves no KV cache.

        Raises:
            BadEngineInfo: it lacks something, or something in it cannot be.
        """
        try:
            said = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadEngineInfo("it is not JSON") from error
        if not isinstance(said, dict) or "transfer_mode" not in said:
            raise BadEngineInfo("it is no object with a transfer_mode")
        word = said["transfer_mode"]
        if word is None:
            return None
        if not isinstance(word, str) or word not in _MODES:
            raise BadEngineInfo(f"transfer_mode is {word!r}, neither 'pull' nor 'push'")
        return cls(
            _text(said, "engine_id"),
            _MODES[word],
            _text(said, "side_channel_host"),
            _count(said, "side_channel_port"),
            _count(said, "tp_size", 1),
            _count(said, "pp_size", 1),
            _count(said, "dp_size", 1),
            said.get("role"),
            bool(said.get("bidirectional")),
            _seconds(said, "kv_lease_seconds", LEASE_SECONDS),
        )

    @classmethod
    def from_ticket(cls, params: Mapping[str, Any]) -> EngineInfo | None:
        """What a prefill server's ticket says of it, one rank of it at least; None when that is too little.

        vLLM names the mode in its tickets since it has write mode: without a name it is read mode.
        """
        word = params.get("transfer_mode") or "pull"
        try:
            return cls(
                _text(params, "remote_engine_id"),
                _MODES[word],
                _text(params, "remote_host"),
                _count(params, "remote_port"),
                _count(params, "tp_size", 1),
                _count(params, "pp_size", 1),
            )
        except (BadEngineInfo, KeyError, TypeError):
            return None

    def names(self, engine_id: Any) -> bool:
        """Whether *engine_id* is this engine's, or that of one of its ranks."""
        return isinstance(engine_id, str) and same_engine(engine_id, self.engine_id)

    def id_of_rank(self, rank: int) -> str:
        """The engine id of a data-parallel rank (vllm 0.32, v1/engine/core.py)."""
        return self.engine_id if self.dp_size == 1 else f"{self.engine_id}_dp{rank}"

    def misplaced(self, role: Role) -> bool:
        """Whether it was started for the other role."""
        return self.kv_role not in (None, "kv_both", role.kv_role)


def same_engine(one: str, other: str) -> bool:
    """Whether two ids are of one start of an engine: its ranks add their number (vllm 0.32, v1/engine/core.py)."""
    # Mostly they are the same to the letter, and every request asks.
    return one == other or _RANK.sub("", one) == _RANK.sub("", other)


def disagreement(modes: Mapping[str, TransferMode], wanted: TransferMode | None) -> str | None:
    """Why instances cannot hand over to each other, or None when they can.

    Args:
        modes: of the instances, by name.
        wanted: what the user insists on.
    """
    if wanted is not None:
        others = [name for name, mode in modes.items() if mode is not wanted]
        if not others:
            return None
        return f"{wanted} mode was asked for, but these are in another: {', '.join(others)}"
    if len(set(modes.values())) < 2:
        return None
    each = ", ".join(f"{name} {mode}" for name, mode in modes.items())
    return f"the engines differ in transfer mode ({each}): start all of them with the same --transfer-mode"


def _text(said: Mapping[str, Any], key: str) -> str:
    value = said.get(key)
    if not isinstance(value, str) or not value:
        raise BadEngineInfo(f"{key} is {value!r}, not a text")
    return value


def _count(said: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = said.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
        raise BadEngineInfo(f"{key} is {value!r}, not a number from 1 to 65535")
    return value


def _seconds(said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise BadEngineInfo(f"{key} is {value!r}, not a number of seconds")
    return float(value)
