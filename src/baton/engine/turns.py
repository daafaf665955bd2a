"""What two engines have in common of a conversation: digests of its tokens, made on one and compared on the other.

Pure functions. A decode server that keeps a turn's blocks writes digests of their tokens into the ticket; the prefill
server that gets the next turn's prompt compares, and pulls no more than what is equal. vLLM (0.32) takes the kept
blocks for a prefix of the next prompt without looking, which is wrong as soon as a client edits its history or a
template drops a thought.
"""

from __future__ import annotations

import base64
import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

DIGEST_BYTES = 8


def digests(tokens: Sequence[int], block_size: int, salt: str) -> dict[str, Any]:
    """Keys for the ticket of *tokens*, whose KV cache is in blocks of *block_size* tokens.

    Args:
        salt: whatever else the KV cache depends on (adapter, tenant's cache salt).

    Returns:
        ``block_size``; ``block_digests``: base64 of 8 bytes for each full block, over everything up to its end;
        ``tail_digest``: the same for what follows the last full block, empty when nothing does.
    """
    made = list(_chain(tokens, block_size, salt))
    full = len(tokens) // block_size
    return {
        "block_size": block_size,
        "block_digests": base64.b64encode(b"".join(made[:full])).decode(),
        "tail_digest": base64.b64encode(b"".join(made[full:])).decode(),
    }


def common_tokens(ticket: dict[str, Any], prompt: Sequence[int], block_size: int, salt: str) -> int:
    """How many tokens at the start of *prompt* are those whose KV cache *ticket* offers; 0 when nobody can know.

    Whole blocks count, and the tail when all of it is equal.
    """
    offered, held = _count(ticket.get("remote_num_tokens")), ticket.get("block_digests")
    if not isinstance(held, str) or ticket.get("block_size") != block_size:
        return 0
    try:
        theirs = base64.b64decode(held, validate=True)
        tail = base64.b64decode(ticket.get("tail_digest") or "", validate=True)
    except (ValueError, TypeError):
        return 0
    full = min(offered // block_size, len(theirs) // DIGEST_BYTES)
    length = full * block_size
    rest = offered - length
    with_tail = len(tail) == DIGEST_BYTES and 0 < rest < block_size and len(prompt) >= offered
    common = 0
    ours = _chain(prompt[: offered if with_tail else length], block_size, salt)
    for index, digest in enumerate(ours):
        start = index * DIGEST_BYTES
        if index < full:
            if len(prompt) < (index + 1) * block_size or digest != theirs[start : start + DIGEST_BYTES]:
                return common
            common = (index + 1) * block_size
        elif digest == tail:
            return offered
    return common


def _chain(tokens: Sequence[int], block_size: int, salt: str) -> Iterator[bytes]:
    """A digest for each block of *tokens*, the last of which may be short; each is over all before it too."""
    state = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES)
    for start in range(0, len(tokens), block_size):
        state.update(array("q", tokens[start : start + block_size]).tobytes())
        yield state.copy().digest()


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
