"""What an engine holds for readers, and the question by which a reader makes sure of it. Pure but for one lock.

NIXL reads are one-sided: a decode server that reads blocks with an old, used or forged ticket gets whatever is there,
and answers with garbage. So it asks, after its read and before it trusts it, whether the blocks that it has read are
still held for that request and are the KV cache of its own prompt. What is still held after the read was held during
it. The other engine answers from what it knows itself; nothing that a ticket says counts.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MARK = b"baton-held:"
YES = b"baton-held:yes"
"""Any other answer that begins with the mark is a no, and says why."""

DIGEST_BYTES = 16


class Claim(msgspec.Struct, frozen=True):
    """What a reader has read, and for what.

    Attributes:
        request_id: the other engine's own id of the request whose blocks they are.
        blocks: logical block numbers by KV cache group, as in the ticket.
        tokens: how many tokens of its prompt the reader takes from them.
        digest: of those tokens; None when there is nothing to compare (embeddings, images).
    """

    request_id: str
    blocks: list[list[int]]
    tokens: int
    digest: bytes | None


@dataclass(frozen=True)
class Kept:
    """What is held for a reader of one request.

    Attributes:
        blocks: as they were given out.
        tokens: whose KV cache they hold.
        salt: what it depends on beside them; None when it cannot be said.
    """

    blocks: tuple[tuple[int, ...], ...]
    tokens: array[int]
    salt: str | None


def digest(tokens: Sequence[int], salt: str) -> bytes:
    """Of *tokens* and whatever else their KV cache depends on (adapter, tenant's cache salt)."""
    made = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES)
    made.update(array("q", tokens).tobytes())
    return made.digest()


class Held:
    """All that an engine holds for readers. The scheduler's thread changes it, another asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, Kept] = {}

    def keep(self, request_id: str, blocks: Any, tokens: Sequence[int], salt: str | None) -> None:
        kept = Kept(tuple(tuple(group) for group in blocks), array("q", tokens), salt)
        with self._lock:
            self._kept[request_id] = kept

    def release(self, request_id: str) -> None:
        """To be called before the blocks can be anybody else's."""
        with self._lock:
            self._kept.pop(request_id, None)

    def problem(self, claim: Claim) -> str | None:
        """Why *claim* does not hold, or None when it does."""
        with self._lock:
            kept = self._kept.get(claim.request_id)
        if kept is None:
            return "nothing is held for that request (any more)"
        theirs = [tuple(group) for group in claim.blocks]
        if len(theirs) != len(kept.blocks) or any(
            group != ours[: len(group)] for group, ours in zip(theirs, kept.blocks, strict=True)
        ):
            return "those are not the blocks of that request"
        if claim.tokens > len(kept.tokens):
            return f"they hold {len(kept.tokens)} tokens, not {claim.tokens}"
        unknown = claim.digest is None or kept.salt is None
        if not unknown and digest(kept.tokens[: claim.tokens], kept.salt or "") != claim.digest:
            return "they hold another prompt"
        return None

    def answer(self, question: bytes) -> bytes:
        """The answer to *question* (:func:`question`)."""
        try:
            claim = msgspec.msgpack.decode(question[len(MARK) :], type=Claim)
        except msgspec.DecodeError:
            return MARK + b"the question cannot be read"
        problem = self.problem(claim)
        return YES if problem is None else MARK + problem.encode()


def question(claim: Claim) -> bytes:
    return MARK + msgspec.msgpack.encode(claim)
