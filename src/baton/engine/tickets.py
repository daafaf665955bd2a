"""What a ticket (``kv_transfer_params``) may hold before an engine is given it. Pure.

vLLM (0.32) trusts it: one missing key ends the whole engine, in the middle of everybody's requests. Checked where the
request comes in, so that a bad one is that request's own 400.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

MAX_KEYS = 64
MAX_TEXT = 1024
MAX_DIGESTS = 1 << 22
"""Characters of the digests of a kept turn: 8 bytes a block in base64, for 400,000 blocks."""
MAX_RANKS = 1 << 16
MAX_NUMBER = 1 << 31
MAX_TIME = 1e15
MAX_DEPTH = 8


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    # It goes into notices between engines, in UTF-8, and into a C library as a host.
    return isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable()


def _is_base64(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_DIGESTS and value.isascii()


def _is_port(value: Any) -> bool:
    return _whole(value) and 0 < value < 65536


def _is_size(value: Any) -> bool:
    return _whole(value) and 0 < value <= MAX_RANKS


def _is_count(value: Any) -> bool:
    return _whole(value) and 0 <= value < MAX_NUMBER


def _is_time(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) < MAX_TIME if isinstance(value, int) else math.isfinite(value) and abs(value) < MAX_TIME


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether *value* can be sent to the engine at all: a value that is nested 900 times ends it (vllm 0.32)."""
    if depth > MAX_DEPTH:
        return False
    match value:
        case dict():
            return all(_is_plain(key, depth) and _is_plain(each, depth + 1) for key, each in value.items())
        case list() | tuple():
            return all(_is_plain(each, depth + 1) for each in value)
        case str():
            return not any("\ud800" <= letter <= "\udfff" for letter in value) if not value.isascii() else True
        case int():
            return -(1 << 63) <= value < 1 << 64
    return True


def _are_blocks(groups: Any) -> bool:
    """Lists of block numbers, one a KV cache group; nothing, or one empty list, is a prompt without blocks."""
    lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    return lists and all(_is_count(block) for group in groups for block in group)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("do_remote_prefill", "do_remote_decode", "keep_blocks"), (_is_flag, "true or false")),
    **dict.fromkeys(
        ("remote_engine_id", "remote_request_id", "remote_host", "transfer_mode"),
        (_is_text, f"a text of at most {MAX_TEXT} characters"),
    ),
    **dict.fromkeys(("block_digests", "tail_digest"), (_is_base64, "a text in base64")),
    **dict.fromkeys(("tp_size", "dcp_size", "pp_size"), (_is_size, f"a whole number from 1 to {MAX_RANKS}")),
    **dict.fromkeys(
        ("remote_num_tokens", "remote_prefill_cached_tokens", "block_size", "remote_block_size"),
        (_is_count, "a whole number of 0 or more"),
    ),
    "remote_port": (_is_port, "a port number"),
    "remote_blocks_expiry_time": (_is_time, "a number"),
    "remote_block_ids": (_are_blocks, "a list of lists of block numbers"),
}
"""What the value of a known key must be, when it is not null; unknown keys are passed on."""


_RANK = re.compile(r"_dp\d+$")
"""What a data-parallel rank adds to its engine's id."""


def problem(ticket: object, *, push: bool, engine_id: str | None = None) -> str | None:
    """What is wrong with *ticket* in one line, or None.

    Args:
        push: whether the engine's connector pushes (write mode).
        engine_id: the engine's own; None when it has no connector.
    """
    if not isinstance(ticket, Mapping):
        return f"kv_transfer_params is {_kind(ticket)}, not an object"
    if len(ticket) > MAX_KEYS:
        return f"kv_transfer_params has {len(ticket)} keys, over {MAX_KEYS}"
    return _wrong_value(ticket) or _contradiction(ticket, engine_id) or _missing(ticket, push)


def _wrong_value(ticket: Mapping[Any, Any]) -> str | None:
    for key, value in ticket.items():
        if not isinstance(key, str) or key.startswith("_"):
            return f"kv_transfer_params.{str(key)[:40]} is not a key of a ticket"
        holds, what = _RULES.get(key, (None, ""))
        if holds is not None and value is not None and not holds(value):
            return f"kv_transfer_params.{key} is not {what}"
        if holds is None and not (_is_plain(key) and _is_plain(value)):
            return f"kv_transfer_params.{key[:40]!a} is nested too deeply, or holds what has no place in a message"
    return None


def _contradiction(ticket: Mapping[str, Any], engine_id: str | None) -> str | None:
    if ticket.get("do_remote_prefill") and ticket.get("do_remote_decode"):
        return "kv_transfer_params says both do_remote_prefill and do_remote_decode"
    named = ticket.get("remote_engine_id")
    if engine_id and named and _RANK.sub("", named) == _RANK.sub("", engine_id):
        return "kv_transfer_params.remote_engine_id is this engine itself"
    return None


def _missing(ticket: Mapping[str, Any], push: bool) -> str | None:
    """The first key that the connector would not find."""
    reads = bool(ticket.get("do_remote_prefill")) or bool(ticket.get("do_remote_decode") and _blocks(ticket))
    if not reads:
        return None
    needed = ["remote_engine_id", "remote_host", "remote_port"]
    needed += ["tp_size"] if push else ["remote_block_ids", "remote_request_id"]
    for key in needed:
        if not ticket.get(key):
            return f"kv_transfer_params lacks {key}"
    for key in ("tp_size", "dcp_size", "pp_size"):
        # vLLM reads a size that is null, where it would take a missing one for 1.
        if key in ticket and ticket[key] is None:
            return f"kv_transfer_params.{key} is null"
    return None


def _blocks(ticket: Mapping[str, Any]) -> bool:
    return any(ticket.get("remote_block_ids") or ())


def _kind(value: object) -> str:
    return {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )
