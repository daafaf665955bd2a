"""The ledger: every lease on KV blocks with its life, and everything that was read although nobody held it. Pure.

A lease is one request's right to have its blocks kept until somebody fetched them. Its states::

    HELD -> PULLED     fetched by the other server (in write mode: pushed to it)
         -> RELEASED   given up by the other server, which has told
         -> EXPIRED    nobody came and nobody renewed it
         -> LOST       its engine ended

POISON is a read of blocks that were not, or no longer, held for the reader: a real engine would answer with garbage.
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

REMEMBERED = 1000
"""How many leases that ended are kept for who asks."""


class LeaseState(enum.StrEnum):
    """What became of a lease."""

    HELD = "held"
    PULLED = "pulled"
    RELEASED = "released"
    EXPIRED = "expired"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Lease:
    """One request's blocks, kept for another server.

    Attributes:
        engine_id: of the rank that keeps them.
        request_id: of the request there.
        blocks: their numbers.
        tokens: how many they hold.
        given_at, expires_at, ended_at: in seconds on the ledger's clock.
        renewed: how often.
        undelivered: whether the answer that carried its ticket was broken off: nobody can know of it, and only its
            end frees it.
        turn: whether a decode server keeps it for a conversation's next request.
        on_end: called once when it ends, to free the blocks.
    """

    engine_id: str
    request_id: str
    blocks: Sequence[int]
    tokens: int
    given_at: float
    expires_at: float
    on_end: Callable[[Lease], None]
    state: LeaseState = LeaseState.HELD
    renewed: int = 0
    ended_at: float | None = None
    undelivered: bool = False
    turn: bool = False

    @property
    def held(self) -> bool:
        return self.state is LeaseState.HELD

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine_id": self.engine_id,
            "request_id": self.request_id,
            "blocks": list(self.blocks),
            "tokens": self.tokens,
            "state": str(self.state),
            "given_at": self.given_at,
            "expires_at": self.expires_at,
            "ended_at": self.ended_at,
            "renewed": self.renewed,
            "undelivered": self.undelivered,
            "turn": self.turn,
        }


@dataclass(frozen=True, slots=True)
class Poison:
    """A read that should not have been: who read, of whom, what for, and why it was wrong."""

    at: float
    reader: str
    engine_id: str
    request_id: str
    why: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "reader": self.reader,
            "engine_id": self.engine_id,
            "request_id": self.request_id,
            "why": self.why,
        }


@dataclass
class Ledger:
    """All leases of all engines of one lab.

    Args:
        clock: seconds, monotonic.
    """

    clock: Callable[[], float]
    poison: list[Poison] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    ended: deque[Lease] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _held: dict[tuple[str, str], Lease] = field(default_factory=dict)
    # By expiry as it was when they were put here; a renewal only moves them when they come up.
    _queue: list[tuple[float, int, Lease]] = field(default_factory=list)
    _number: int = 0

    def give(
        self,
        engine_id: str,
        request_id: str,
        blocks: Sequence[int],
        *,
        tokens: int,
        seconds: float,
        on_end: Callable[[Lease], None],
        turn: bool = False,
    ) -> Lease:
        """A new lease of *seconds*."""
        now = self.clock()
        lease = Lease(engine_id, request_id, blocks, tokens, now, now + seconds, on_end, turn=turn)
        self._held[engine_id, request_id] = lease
        self._number += 1
        heapq.heappush(self._queue, (lease.expires_at, self._number, lease))
        self.counts["given"] += 1
        return lease

    def find(self, engine_id: str, request_id: str) -> Lease | None:
        """A lease that is held."""
        return self._held.get((engine_id, request_id))

    def renew(self, engine_id: str, request_id: str, seconds: float) -> bool:
        """A heartbeat: it shall last *seconds* from now; False when there is none to renew."""
        lease = self._held.get((engine_id, request_id))
        if lease is None:
            return False
        lease.expires_at = max(lease.expires_at, self.clock() + seconds)
        lease.renewed += 1
        self.counts["renewed"] += 1
        return True

    def end(self, lease: Lease, state: LeaseState) -> None:
        """*lease* ends, unless it has already."""
        if not lease.held:
            return
        lease.state = state
        lease.ended_at = self.clock()
        del self._held[lease.engine_id, lease.request_id]
        self.counts[str(state)] += 1
        self.ended.append(lease)
        lease.on_end(lease)

    def spoil(self, reader: str, engine_id: str, request_id: str, why: str) -> None:
        """*reader* read what it must not."""
        self.poison.append(Poison(self.clock(), reader, engine_id, request_id, why))

    def due(self) -> bool:
        """Whether a lease may have expired."""
        return bool(self._queue) and self._queue[0][0] <= self.clock()

    def reap(self, asleep: Callable[[str], bool] = lambda _: False) -> list[Lease]:
        """End what has expired; what that was.

        Args:
            asleep: whether an engine stands still, by id: such a one looks at its leases when it wakes.
        """
        now, kept, expired = self.clock(), [], []
        while self._queue and self._queue[0][0] <= now:
            _, number, lease = heapq.heappop(self._queue)
            if not lease.held:
                continue
            if lease.expires_at > now:
                heapq.heappush(self._queue, (lease.expires_at, number, lease))
            elif asleep(lease.engine_id):
                kept.append((now + 0.05, number, lease))
            else:
                self.end(lease, LeaseState.EXPIRED)
                expired.append(lease)
        for entry in kept:
            heapq.heappush(self._queue, entry)
        return expired

    def lose(self, engine_id: str) -> None:
        """The engine has ended, and with it all that it kept."""
        for lease in [each for each in self._held.values() if each.engine_id == engine_id]:
            self.end(lease, LeaseState.LOST)

    def held(self, *, turns: bool = False) -> list[Lease]:
        """What is held now; a conversation's kept blocks only when *turns* are asked for."""
        return [lease for lease in self._held.values() if turns or not lease.turn]

    def at_rest(self) -> bool:
        """Nothing is held that anybody could still release, nothing has expired on anybody, nothing was poisoned."""
        return not self.leaked() and not self.poison

    def leaked(self) -> list[Lease]:
        """Held although nobody is at it; to be asked when no request is under way."""
        return [lease for lease in self.held() if not lease.undelivered]

    def as_dict(self) -> dict[str, Any]:
        return {
            "at_rest": self.at_rest(),
            "counts": dict(self.counts),
            "held": [lease.as_dict() for lease in self.held(turns=True)],
            "ended": [lease.as_dict() for lease in self.ended],
            "poison": [each.as_dict() for each in self.poison],
        }
