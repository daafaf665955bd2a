"""How KV caches move between ranks: pulls, pushes, handshakes, heartbeats. What goes over NIXL between real engines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.sim.faults import Kind
from baton.sim.ledger import Lease, LeaseState, Ledger
from baton.sim.pool import GONE
from baton.sim.rank import HEARTBEATS, Rank
from baton.sim.tickets import base_id

REMEMBERED = 4096
"""Requests that were given up before their prefill server had finished them, at most."""


class TransferFailed(Exception):
    """A KV cache did not come; the request fails, nothing else does."""


@dataclass(eq=False)
class Registration:
    """A decode request that waits for a push: whose, what came, and whether it is under way."""

    reader: Rank
    contents: asyncio.Future[list[bytes]]
    pushing: bool = False


@dataclass
class Fabric:
    """All ranks that are up, by engine id, and the pushes that are to come.

    Attributes:
        moves, failures: transfers with their bytes, and those that failed, by engine id of who counts them, as vLLM
            does: the puller, or the pusher.
        expired: leases that nobody came for, by engine id of who gave them.
    """

    ledger: Ledger
    ranks: dict[str, Rank] = field(default_factory=dict)
    moves: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    expired: dict[str, int] = field(default_factory=dict)
    _registered: dict[tuple[str, str], Registration] = field(default_factory=dict)
    _finished: dict[tuple[str, str], Lease] = field(default_factory=dict)
    _cancelled: dict[tuple[str, str], None] = field(default_factory=dict)
    _orphans: dict[tuple[str, str], None] = field(default_factory=dict)
    _pushing: set[asyncio.Task[None]] = field(default_factory=set)

    def remove(self, rank: Rank) -> None:
        """*rank* has ended, and with it all that it kept or waited for."""
        rank.alive = False
        self.ranks.pop(rank.engine_id, None)
        for table in (self._registered, self._finished, self._cancelled, self._orphans):
            for key in [each for each in table if each[0] == rank.engine_id]:
                del table[key]
        self.ledger.lose(rank.engine_id)

    def note_expired(self, lease: Lease) -> None:
        """A lease has ended by itself; in write mode nobody will push from it any more."""
        self.expired[lease.engine_id] = self.expired.get(lease.engine_id, 0) + 1
        self._finished.pop((lease.engine_id, base_id(lease.request_id)), None)

    # heartbeats and releases

    def renew(self, ticket: Mapping[str, Any]) -> None:
        """A decode server says that it still wants a KV cache."""
        source = self.ranks.get(ticket["remote_engine_id"])
        if source is not None:
            request_id = ticket.get("remote_request_id") or ""
            self.ledger.renew(source.engine_id, request_id, source.settings.lease_seconds)

    def release(self, ticket: Mapping[str, Any]) -> None:
        """It says that it does not."""
        lease = self.ledger.find(ticket.get("remote_engine_id") or "", ticket.get("remote_request_id") or "")
        if lease is not None:
            self.ledger.end(lease, LeaseState.RELEASED)

    def orphan(self, ticket: Mapping[str, Any], request_id: str) -> None:
        """A decode server takes no notice of its ticket, or has ended with it: nobody will free what it stands for."""
        engine_id = ticket.get("remote_engine_id") or ""
        lease = self.ledger.find(engine_id, ticket.get("remote_request_id") or "")
        lease = lease or self._finished.get((engine_id, request_id))
        if lease is not None:
            lease.undelivered = True
        elif ticket.get("transfer_mode") == "push" and engine_id in self.ranks:
            self._remember(self._orphans, (engine_id, request_id))

    # read mode

    async def handshake(self, one: Rank, other: Rank, seconds: float) -> None:
        """Two ranks meet; those who come meanwhile wait with them."""
        now = asyncio.get_running_loop().time()
        known = one.shaken.get(other.engine_id)
        if known is None:
            known = one.shaken[other.engine_id] = now + seconds
        if known > now:
            await asyncio.sleep(known - now)

    async def move(self, mover: Rank, peer: Rank, blocks: int, faults: Mapping[Kind, float]) -> None:
        """The time that it takes.

        Raises:
            TransferFailed: it fails.
        """
        settings = mover.settings
        await self.handshake(mover, peer, faults.get(Kind.HANDSHAKE, settings.handshake_seconds))
        size = blocks * settings.block_size * settings.token_bytes
        if settings.transfer_bytes_per_second != math.inf:
            await asyncio.sleep(size / settings.transfer_bytes_per_second)
        await peer.awake()
        if Kind.TRANSFER_FAILS in faults or not peer.alive or not mover.alive:
            self.failures[mover.engine_id] = self.failures.get(mover.engine_id, 0) + 1
            raise TransferFailed(f"the transfer between {mover.engine_id} and {peer.engine_id} failed")
        self.moves.setdefault(mover.engine_id, [0, 0])
        self.moves[mover.engine_id][0] += 1
        self.moves[mover.engine_id][1] += size

    async def pull(
        self, reader: Rank, ticket: Mapping[str, Any], count: int, faults: Mapping[Kind, float]
    ) -> list[bytes]:
        """The contents of the first *count* blocks that a ticket names; its lease ends with that.

        Whatever is read without a lease is POISON, and not what was there.

        Raises:
            TransferFailed: its engine is gone, or the transfer fails.
        """
        engine_id, request_id = ticket["remote_engine_id"], ticket["remote_request_id"]
        source = self.ranks.get(engine_id)
        if source is None:
            self.failures[reader.engine_id] = self.failures.get(reader.engine_id, 0) + 1
            raise TransferFailed(f"there is no engine {engine_id}")
        try:
            await self.move(reader, source, count, faults)
        except TransferFailed:
            # The reader tells that it will not come again.
            self.release(ticket)
            raise
        blocks = [block for group in ticket["remote_block_ids"] for block in group][:count]
        lease = self.ledger.find(engine_id, request_id)
        if lease is None:
            self.ledger.spoil(reader.engine_id, engine_id, request_id, "no lease: it has ended or never was")
            return [GONE] * count
        foreign = set(blocks) - set(lease.blocks)
        contents = [GONE if block in foreign else source.pool.read(block) for block in blocks]
        self.ledger.end(lease, LeaseState.PULLED)
        if foreign or len(blocks) < count:
            self.ledger.spoil(reader.engine_id, engine_id, request_id, f"foreign blocks: {sorted(foreign)}")
            contents += [GONE] * (count - len(blocks))
        return contents

    # write mode

    async def await_push(
        self, reader: Rank, ticket: Mapping[str, Any], request_id: str, faults: Mapping[Kind, float]
    ) -> list[bytes]:
        """Register with the prefill server that a ticket names, and wait for its push.

        Raises:
            TransferFailed: there is no such engine, or the transfer fails.
        """
        source = self.ranks.get(ticket["remote_engine_id"])
        if source is None:
            raise TransferFailed(f"there is no engine {ticket['remote_engine_id']}")
        key = (source.engine_id, base_id(request_id))
        registration = Registration(reader, asyncio.get_running_loop().create_future())
        self._registered[key] = registration
        lease = self._finished.pop(key, None)
        if lease is not None:
            self._push(key, lease, faults)
        try:
            return await registration.contents
        finally:
            if registration.contents.cancelled() and not registration.pushing:
                self._registered.pop(key, None)
                if reader.alive:
                    self._cancel(key)
                else:
                    self.orphan(ticket, key[1])

    def finished(self, source: Rank, request_id: str, lease: Lease, faults: Mapping[Kind, float]) -> None:
        """A prefill server has computed a prompt."""
        key = (source.engine_id, base_id(request_id))
        if key in self._cancelled:
            del self._cancelled[key]
            self.ledger.end(lease, LeaseState.RELEASED)
        elif key in self._registered:
            self._push(key, lease, faults)
        else:
            if key in self._orphans:
                del self._orphans[key]
                lease.undelivered = True
            self._finished[key] = lease

    def give_up(self, ticket: Mapping[str, Any], request_id: str) -> None:
        """A decode request ends that has never registered."""
        if ticket["remote_engine_id"] in self.ranks:
            self._cancel((ticket["remote_engine_id"], base_id(request_id)))

    def _cancel(self, key: tuple[str, str]) -> None:
        self._registered.pop(key, None)
        lease = self._finished.pop(key, None)
        if lease is not None:
            self.ledger.end(lease, LeaseState.RELEASED)
            return
        self._remember(self._cancelled, key)

    @staticmethod
    def _remember(table: dict[tuple[str, str], None], key: tuple[str, str]) -> None:
        table[key] = None
        while len(table) > REMEMBERED:
            del table[next(iter(table))]

    def _push(self, key: tuple[str, str], lease: Lease, faults: Mapping[Kind, float]) -> None:
        registration = self._registered[key]
        registration.pushing = True
        task = asyncio.get_running_loop().create_task(self._write(registration, key, lease, faults))
        self._pushing.add(task)
        task.add_done_callback(self._pushing.discard)

    async def _write(
        self, registration: Registration, key: tuple[str, str], lease: Lease, faults: Mapping[Kind, float]
    ) -> None:
        source = self.ranks[key[0]]
        try:
            await self.move(source, registration.reader, len(lease.blocks), faults)
        except TransferFailed as error:
            self.ledger.end(lease, LeaseState.RELEASED)
            if not registration.contents.done():
                registration.contents.set_exception(error)
            return
        finally:
            if self._registered.get(key) is registration:
                del self._registered[key]
        if not lease.held:
            self.ledger.spoil(registration.reader.engine_id, *key, "pushed after the lease had ended")
            contents = [GONE] * len(lease.blocks)
        else:
            contents = [source.pool.read(block) for block in lease.blocks]
        self.ledger.end(lease, LeaseState.PULLED)
        if not registration.contents.done():
            registration.contents.set_result(contents)

    async def close(self) -> None:
        for task in list(self._pushing):
            task.cancel()
        await asyncio.gather(*self._pushing, return_exceptions=True)

    @staticmethod
    def beat_seconds(lease_seconds: float) -> float:
        return max(lease_seconds / HEARTBEATS, 0.01)
