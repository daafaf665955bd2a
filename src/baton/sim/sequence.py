"""One prompt's way through an engine to one answer: a place, KV blocks, their contents, the text, a ticket or nothing.

What a sequence holds is given back in one place, :meth:`Running.leave`, whatever became of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from baton.sim import tickets
from baton.sim.fabric import Fabric, TransferFailed
from baton.sim.faults import Kind
from baton.sim.ledger import Lease
from baton.sim.rank import Rank
from baton.sim.requests import Job
from baton.sim.text import TOKEN_BYTES, Text, answer_of, contents_of, count_of, most_tokens, tokens_of

KEPT_SHARE = 0.5
"""Of the KV cache: what kept turns may hold, as in a Baton engine."""

NOTHING = Text((), "length")


class GenerationFailed(Exception):
    """What vLLM says of a request whose KV cache did not come (``kv_load_failure_policy`` fail)."""

    def __init__(self, message: str = "Internal server error") -> None:
        super().__init__(message)


class Owner(Protocol):
    """What a sequence asks of its engine."""

    fabric: Fabric

    @property
    def asleep(self) -> bool: ...

    async def awake(self) -> None: ...


class Running:
    """One sequence.

    Args:
        job: the request that it is of.
        prompt: its tokens.
        request_id: its id in the engine.
        sample: its number among the answers to one prompt.
        rank: where it runs.
        engine: whose rank that is.
        faults: what goes wrong with it.

    Attributes:
        text: the answer, once it has begun.
        computed: whether the prompt was computed here: then the first token comes with it.
        cached: tokens of the prompt that were not computed.
        lease: what keeps its blocks after its end.
    """

    def __init__(
        self,
        job: Job,
        prompt: bytes,
        *,
        request_id: str,
        sample: int,
        rank: Rank,
        engine: Owner,
        faults: Mapping[Kind, float],
    ) -> None:
        self.job = job
        self.prompt = prompt
        self.request_id = request_id
        self.sample = sample
        self.rank = rank
        self.tokens = count_of(prompt)
        self.text = NOTHING
        self.computed = False
        self.cached = 0
        self.lease: Lease | None = None
        self._engine = engine
        self._faults = faults
        self._ticket = job.ticket
        self._blocks: list[int] | None = None
        self._fetches = bool(self._ticket and self._ticket.get("do_remote_prefill"))
        self._beat: asyncio.TimerHandle | None = None

    @property
    def steps(self) -> int:
        """Decode steps that the whole answer takes."""
        return max(len(self.text.tokens) - self.computed, 0)

    async def begin(self) -> None:
        """From the queue to the KV cache of the prompt; the answer is known then.

        Raises:
            GenerationFailed: the KV cache did not come.
        """
        settings, rank = self.rank.settings, self.rank
        size = settings.block_size
        if self._fetches:
            self._heartbeat()
        self._blocks = await rank.admit(-(-(self.tokens + most_tokens(self.job.sampling)) // size))
        if rank.settings.connector and self._fetches:
            contents = await self._fetch(-(-self.tokens // size))
        else:
            contents = None
        if contents is None:
            contents = await self._compute()
        await self._engine.awake()
        rank.pool.write(self._blocks, contents)
        read = [rank.pool.read(block) for block in self._blocks[: len(contents)]]
        self.text = Text((), "stop") if Kind.EOS in self._faults else answer_of(read, self.job.sampling, self.sample)

    async def _fetch(self, count: int) -> list[bytes] | None:
        """The KV cache of the prompt from the prefill server; None when the ticket does not cover it."""
        assert self._ticket is not None
        fabric = self._engine.fabric
        try:
            if self.rank.pushes:
                # Whoever waits there and is cancelled has told so.
                self._fetches = False
                contents = await fabric.await_push(self.rank, self._ticket, self.request_id, self._faults)
                if len(contents) < count:
                    return None
            else:
                groups = self._ticket["remote_block_ids"]
                if not groups or len(groups[0]) < count:
                    self._fetches = False
                    fabric.release(self._ticket)
                    return None
                contents = await fabric.pull(self.rank, self._ticket, count, self._faults)
                self._fetches = False
        except TransferFailed as error:
            self._fetches = False
            raise GenerationFailed from error
        finally:
            self._stop_beating()
        self.cached = self.tokens - self.tokens % self.rank.settings.block_size
        return contents[:count]

    async def _compute(self) -> list[bytes]:
        """Compute the prompt, but for what is there or comes from a kept turn."""
        settings, rank = self.rank.settings, self.rank
        contents = contents_of(self.prompt, settings.block_size)
        known = rank.pool.known(contents) if settings.prefix_cache else 0
        ticket = self._ticket
        if ticket and ticket.get("do_remote_decode") and tickets.offers_turn(ticket):
            known = max(known, await self._fetch_turn(ticket, contents))
        self.cached = min(known * settings.block_size, self.tokens - 1)
        await rank.compute(self.tokens - self.cached)
        self.computed = True
        return contents

    async def _fetch_turn(self, ticket: Mapping[str, Any], contents: list[bytes]) -> int:
        """What a kept turn has in common with the prompt, in blocks, fetched into *contents*."""
        fabric, size = self._engine.fabric, self.rank.settings.block_size
        common = tickets.common_blocks(ticket, contents, size) if self.rank.settings.bidirectional else 0
        if not common:
            fabric.release(ticket)
            return 0
        try:
            contents[:common] = await fabric.pull(self.rank, ticket, common, self._faults)
        except TransferFailed as error:
            raise GenerationFailed from error
        return common

    def finish(self) -> Mapping[str, Any] | None:
        """It has ended well; the ticket for whoever goes on with its KV cache."""
        ticket, settings = self._ticket, self.rank.settings
        if self._blocks is None or ticket is None or not self.rank.alive:
            return None
        if ticket.get("do_remote_decode"):
            stopped = self.text.finish == "stop" and bool(self.job.sampling.stop)
            if stopped or Kind.EOS in self._faults:
                return None
            return self._hand_over(self.prompt, self._faults.get(Kind.LEASE, settings.lease_seconds), turn=False)
        if settings.bidirectional and ticket.get("keep_blocks") is not False and "do_remote_prefill" in ticket:
            return self._keep()
        return None

    def _keep(self) -> Mapping[str, Any] | None:
        """Keep the blocks for the conversation's next turn, when there is room."""
        rank, settings = self.rank, self.rank.settings
        assert self._blocks is not None
        if rank.kept + len(self._blocks) > KEPT_SHARE * settings.kv_blocks:
            return None
        longest = len(self._blocks) * settings.block_size * TOKEN_BYTES
        whole = tokens_of((self.prompt.rstrip(b"\0") + self.text.text.encode()).decode(errors="replace"))[:longest]
        contents = contents_of(whole, settings.block_size)
        rank.pool.write(self._blocks, contents)
        made = self._hand_over(whole, settings.turn_seconds, turn=True)
        return {**made, **tickets.digests(contents, settings.block_size, count_of(whole))}

    def _hand_over(self, tokens: bytes, seconds: float, *, turn: bool) -> dict[str, Any]:
        rank, fabric = self.rank, self._engine.fabric
        assert self._blocks is not None
        blocks, self._blocks = self._blocks, None
        count = -(-count_of(tokens) // rank.settings.block_size)
        kept, rest = blocks[:count], blocks[count:]
        self.lease = fabric.ledger.give(
            rank.engine_id,
            self.request_id,
            kept,
            tokens=count_of(tokens),
            seconds=seconds,
            on_end=rank.on_lease_end,
            turn=turn,
        )
        rank.kept += count * turn
        rank.leave(rest)
        if rank.pushes and not turn:
            fabric.finished(rank, self.request_id, self.lease, self._faults)
        return tickets.make(
            to_decode=not turn,
            blocks=kept,
            engine_id=rank.engine_id,
            request_id=self.request_id,
            host=rank.host,
            port=rank.port,
            tokens=count_of(tokens) + (0 if turn else len(self.text.tokens) - 1),
            push=rank.pushes,
            cached=None if turn or len(self.text.tokens) > 1 else self.cached,
            expires=self.lease.expires_at if turn else None,
        )

    def leave(self) -> None:
        """Give back what is still held: blocks, place, and the prefill server's blocks when nobody will fetch them."""
        self._stop_beating()
        if self._blocks is not None:
            blocks, self._blocks = self._blocks, None
            if self.rank.alive:
                self.rank.leave(blocks)
        if self._fetches and self._ticket is not None:
            self._fetches = False
            self._let_go(self._ticket)

    def _let_go(self, ticket: Mapping[str, Any]) -> None:
        """The request was given up before its KV cache was here: the prefill server is told, once this one is awake."""
        if not self.rank.alive:
            self._engine.fabric.orphan(ticket, tickets.base_id(self.request_id))
        elif self._engine.asleep:
            asyncio.get_running_loop().call_later(0.02, self._let_go, ticket)
        elif self.rank.pushes:
            self._engine.fabric.give_up(ticket, self.request_id)
        else:
            self._engine.fabric.release(ticket)

    def _heartbeat(self) -> None:
        """Renew the lease while the KV cache is not here."""
        assert self._ticket is not None
        fabric, settings = self._engine.fabric, self.rank.settings
        if self._beat is not None and not self._engine.asleep:
            fabric.renew(self._ticket)
        seconds = fabric.beat_seconds(settings.lease_seconds)
        self._beat = asyncio.get_running_loop().call_later(seconds, self._heartbeat)

    def _stop_beating(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None
