"""The tickets of fake engines: vLLM's keys (0.32), and what an engine that Baton started refuses. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_RANDOM = re.compile(r"-[0-9a-f]{8}$")
_DIGEST_BYTES = 16
_NEEDED = ("remote_engine_id", "remote_host", "remote_port")


def base_id(request_id: str) -> str:
    """A request's id without its random end: what two legs of one request have in common."""
    return _RANDOM.sub("", request_id)


def problem(ticket: object, *, push: bool) -> str | None:
    """What is wrong with *ticket* in one line, or None.

    Args:
        push: whether the engine is in write mode.
    """
    if not isinstance(ticket, Mapping):
        return "kv_transfer_params is not an object"
    for keys, holds, what in _TYPES:
        for key in keys:
            if ticket.get(key) is not None and not holds(ticket[key]):
                return f"kv_transfer_params.{key} is not {what}"
    if ticket.get("do_remote_prefill") and ticket.get("do_remote_decode"):
        return "kv_transfer_params says both do_remote_prefill and do_remote_decode"
    if not (ticket.get("do_remote_prefill") or (ticket.get("do_remote_decode") and offers_turn(ticket))):
        return None
    needed = (*_NEEDED, *(("tp_size",) if push else ("remote_block_ids", "remote_request_id")))
    return next((f"kv_transfer_params lacks {key}" for key in needed if not ticket.get(key)), None)


def _are_blocks(groups: Any) -> bool:
    lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    return lists and all(isinstance(block, int) and block >= 0 for group in groups for block in group)


_TYPES: Sequence[tuple[Sequence[str], Callable[[Any], bool], str]] = (
    (("do_remote_prefill", "do_remote_decode", "keep_blocks"), lambda value: isinstance(value, bool), "true or false"),
    (
        ("remote_engine_id", "remote_request_id", "remote_host", "transfer_mode", "block_digests", "tail_digest"),
        lambda value: isinstance(value, str),
        "a text",
    ),
    (("remote_port",), lambda value: isinstance(value, int) and 0 < value < 65536, "a port number"),
    (("remote_block_ids",), _are_blocks, "a list of lists of block numbers"),
)
"""What the value of a key must be, when it is not null; a Baton engine looks at more of them."""


def offers_turn(ticket: Mapping[str, Any]) -> bool:
    """Whether a prefill leg's ticket is that of a turn that a decode server has kept."""
    return any(ticket.get("remote_block_ids") or ())


def make(
    *,
    to_decode: bool,
    blocks: Sequence[int],
    engine_id: str,
    request_id: str,
    host: str,
    port: int,
    tokens: int,
    push: bool,
    cached: int | None = None,
    expires: float | None = None,
) -> dict[str, Any]:
    """A ticket as vLLM writes it.

    Args:
        to_decode: a prefill server's, for a decode server; else a decode server's, for the next turn.
        cached: tokens of the prompt that the prefill server had; None says nothing.
        expires: when a kept turn ends.
    """
    ticket: dict[str, Any] = {
        "do_remote_prefill": to_decode,
        "do_remote_decode": not to_decode,
        "remote_block_ids": [list(blocks)],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": tokens,
        "transfer_mode": "push" if push else "pull",
    }
    if not push:
        ticket["remote_blocks_expiry_time"] = expires
    if cached is not None:
        ticket["remote_prefill_cached_tokens"] = cached
    return ticket


def digests(contents: Sequence[bytes], block_size: int, tokens: int) -> dict[str, Any]:
    """What a kept turn's ticket says of its tokens, so that the next turn's prefill server can compare."""
    full = tokens // block_size
    return {
        "block_size": block_size,
        "block_digests": base64.b64encode(b"".join(contents[:full])).decode(),
        "tail_digest": base64.b64encode(b"".join(contents[full:])).decode(),
    }


def common_blocks(ticket: Mapping[str, Any], contents: Sequence[bytes], block_size: int) -> int:
    """How many whole blocks at the start of a prompt are those that a kept turn's ticket offers."""
    held = ticket.get("block_digests")
    if not isinstance(held, str) or ticket.get("block_size") != block_size:
        return 0
    try:
        theirs = base64.b64decode(held, validate=True)
    except ValueError:
        return 0
    for place, content in enumerate(contents):
        if theirs[place * _DIGEST_BYTES : (place + 1) * _DIGEST_BYTES] != content:
            return place
    return len(contents)
