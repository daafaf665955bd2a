"""Turns: the KV cache of an answer that its decode server still holds, and who may use it in the next request.

With bidirectional KV a decode server gives a ticket for what it has after an answer; the next request of the same
conversation hands it to its prefill server, which pulls the prefix in place of computing it. The store is the only
owner of those tickets. It is pure but for its clock: nothing here talks to an engine.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from baton.proxy.client_tickets import Signer
from baton.proxy.engine_info import same_engine
from baton.proxy.fleet import ProxyInstance

TTL_SECONDS = 450.0
"""How long a turn may be used. A decode server keeps its blocks for 480 s (vLLM's decoder_kv_blocks_ttl): a ticket that
outlives them would have somebody else's blocks pulled."""
MOST_TURNS = 10_000
_NAMED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")

Owner = tuple[bytes, str]
"""Who may use a turn: the tenant, as a digest of its API key (empty without one), and for which model."""


class Why(enum.StrEnum):
    """Why a turn was not used."""

    NONE = "none"
    EXPIRED = "expired"
    REPLACED = "replaced"
    EVICTED = "evicted"
    DECODE_GONE = "decode_gone"
    ENGINE_RESTARTED = "engine_restarted"
    REFUSED = "refused"
    FORGED = "forged"
    FOREIGN = "foreign"
    USED = "used"


@dataclass(frozen=True, slots=True)
class Kept:
    """One turn in the store.

    Attributes:
        id: random; a client's ticket says it.
        conversation: whose newest turn it is; None for a client that names none and has a ticket of its own.
        params: the decode server's ``kv_transfer_params``, opaque.
        holder: the decode server.
        outages: of the holder, when it got the request.
        expires_at: on the store's clock, in seconds.
    """

    id: bytes
    owner: Owner
    conversation: bytes | None
    params: Mapping[str, Any]
    holder: ProxyInstance
    outages: int
    expires_at: float


def known_engine_id(holder: ProxyInstance) -> str | None:
    """The engine id that an instance has now, where it is known: it is another one after every start.

    Where it is not, an instance that was out in between counts as restarted.
    """
    return holder.info.engine_id if holder.info is not None else None


class TurnStore:
    """Turns that may be used, each once.

    Bounded by number; the least recently kept goes first. One takes the memory of its decode server's ticket: 1.5 KB,
    and about 80 bytes for each block that it names (with digests of 32 bytes).

    Args:
        ttl_seconds: how long each may be used; less than its decode server keeps the blocks.
        most: turns at a time.
        signer: what makes tickets for clients; None gives them none.
        clock: in seconds, monotonic.

    Attributes:
        kept, used: turns that were kept, and those that a prefill leg has been sent with.
        missed: requests of a conversation that went without a turn, by reason.
        dropped: turns that were thrown away unused, by reason; kept = used + dropped + those in the store.
        ignored: clients' tickets that were not taken, by reason.
    """

    def __init__(
        self,
        ttl_seconds: float = TTL_SECONDS,
        most: int = MOST_TURNS,
        signer: Signer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ttl_seconds = ttl_seconds
        self.most = most
        self.signer = signer
        self.clock = clock
        self.kept = 0
        self.used = 0
        self.missed: Counter[Why] = Counter()
        self.dropped: Counter[Why] = Counter()
        self.ignored: Counter[Why] = Counter()
        # Both in the order in which they were kept; a conversation has one turn at most.
        self._turns: dict[bytes, Kept] = {}
        self._newest: dict[tuple[Owner, bytes], bytes] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def keep(self, turn: Kept) -> None:
        """Put a turn in, in the place of its conversation's older one."""
        self.sweep()
        if turn.conversation is not None:
            key = (turn.owner, turn.conversation)
            older = self._newest.get(key)
            if older is not None:
                self._drop(older, Why.REPLACED)
            self._newest[key] = turn.id
        while len(self._turns) >= self.most:
            self._drop(next(iter(self._turns)), Why.EVICTED)
        self._turns[turn.id] = turn
        self.kept += 1

    def take(self, owner: Owner, conversation: bytes) -> Kept | Why:
        """Take a conversation's turn out to use it now, or say why there is none."""
        number = self._newest.get((owner, conversation))
        return Why.NONE if number is None else self._use(number)

    def take_by_id(self, owner: Owner, number: bytes) -> Kept | Why:
        """The same by a turn's id. Another owner's stays where it is."""
        turn = self._turns.get(number)
        if turn is None:
            return Why.USED
        return self._use(number) if turn.owner == owner else Why.FOREIGN

    def sweep(self) -> None:
        """Drop what expired long ago; what has just expired stays as long again, so that who asks late is told so."""
        long_ago = self.clock() - self.ttl_seconds
        while self._turns:
            number, turn = next(iter(self._turns.items()))
            if turn.expires_at > long_ago:
                return
            self._drop(number, Why.EXPIRED)

    def _use(self, number: bytes) -> Kept | Why:
        turn = self._turns[number]
        lost = Why.EXPIRED if turn.expires_at <= self.clock() else holder_lost(turn)
        if lost is not None:
            self._drop(number, lost)
            return lost
        self._pop(number)
        self.used += 1
        return turn

    def _drop(self, number: bytes, why: Why) -> None:
        self._pop(number)
        self.dropped[why] += 1

    def _pop(self, number: bytes) -> None:
        turn = self._turns.pop(number)
        if turn.conversation is not None:
            del self._newest[turn.owner, turn.conversation]


def holder_lost(turn: Kept) -> Why | None:
    """Why the decode server can't have a turn's blocks any more; None when it may still have them."""
    holder = turn.holder
    if not holder.usable:
        return Why.DECODE_GONE
    known = known_engine_id(holder)
    if known is None:
        return Why.ENGINE_RESTARTED if holder.outages != turn.outages else None
    return None if same_engine(str(turn.params["remote_engine_id"]), known) else Why.ENGINE_RESTARTED


class Turn:
    """What one request has to do with turns: the one it may use, and the one that it leaves.

    Args:
        conversation: its name; None when only the client's own ticket says what came before.
        echoed: the client's ticket, whatever it is.

    Attributes:
        given: what the decode server gave, once it has.
    """

    __slots__ = ("_conversation", "_echoed", "_expires_at", "_holder", "_id", "_outages", "_owner", "_store", "given")

    def __init__(self, store: TurnStore, owner: Owner, conversation: bytes | None, echoed: object = None) -> None:
        self._store = store
        self._owner = owner
        self._conversation = conversation
        self._echoed = echoed
        self._holder: ProxyInstance | None = None
        self._outages = 0
        self._expires_at: float | None = None
        self._id = b""
        self.given: Mapping[str, Any] | None = None

    def take(self) -> Mapping[str, Any] | None:
        """The ticket of the turn before this request, which is used up with it; None when there is none."""
        store = self._store
        if self._echoed is not None and store.signer is not None:
            found = self._by_ticket(store.signer)
            if isinstance(found, Kept):
                return found.params
            store.ignored[found] += 1
        if self._conversation is None:
            return None
        found = store.take(self._owner, self._conversation)
        if isinstance(found, Kept):
            return found.params
        store.missed[found] += 1
        return None

    def refused(self) -> None:
        """A prefill server did not take the ticket."""
        self._store.missed[Why.REFUSED] += 1

    def sent_to(self, holder: ProxyInstance) -> None:
        """*holder* generates the answer."""
        self._holder, self._outages = holder, holder.outages

    def held_back(self) -> None:
        """The answer isn't read as it comes: from here on its decode server may be at its end unseen."""
        if self._expires_at is None:
            self._expires_at = self._store.clock() + self._store.ttl_seconds

    def found(self, params: object) -> dict[str, str] | None:
        """The decode server gave *params*: what the client gets in their place, if anything."""
        if self.given is not None or not is_turn(params):
            return None
        self.given = params
        self.held_back()
        self._id = secrets.token_bytes(16)
        if self._store.signer is None or self._expires_at is None:
            return None
        return {"ticket": self._store.signer.sign(self._id, self._expires_at)}

    def keep(self) -> None:
        """The answer is whole: what was given for it may be used, by the request that comes next."""
        if self.given is None or self._holder is None or self._expires_at is None:
            return
        made = Kept(
            self._id, self._owner, self._conversation, self.given, self._holder, self._outages, self._expires_at
        )
        self._store.keep(made)
        # Once: what comes after the end of an answer is no answer.
        self._holder = None

    def _by_ticket(self, signer: Signer) -> Kept | Why:
        signed = signer.read(self._echoed)
        if signed is None:
            return Why.FORGED
        number, expires_at = signed
        if expires_at <= self._store.clock():
            return Why.EXPIRED
        return self._store.take_by_id(self._owner, number)


def is_turn(params: object) -> TypeGuard[dict[str, Any]]:
    """Whether *params* are a ticket for a decode server's blocks: one that lacks a part would break its reader."""
    return isinstance(params, dict) and params.get("do_remote_decode") is True and all(map(params.get, _NAMED))


def client_ticket(params: object) -> object:
    """What a client echoes in the place of engines' parameters, unread; None when it holds none."""
    return params.get("ticket") if isinstance(params, dict) else None
