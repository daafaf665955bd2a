"""One data-parallel rank of an engine: its queue, its speeds and its KV cache."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from baton.cluster import TransferMode
from baton.sim.ledger import Lease
from baton.sim.pool import Pool
from baton.sim.settings import EngineSettings

HEARTBEATS = 6
"""How many a lease has: vLLM sends one each sixth of it (0.32, nixl/base_scheduler.py)."""


class Rank:
    """A scheduler and its KV cache.

    Args:
        engine_id: of this rank, from one start to its end.
        host, port: its side channel, as its tickets say it.

    Attributes:
        awake: waits while the engine stands still.
        alive: false once its engine has ended.
        running: requests that it works on.
        shaken: engine ids that it has met, with the time from which on it knows them.
    """

    def __init__(
        self, settings: EngineSettings, engine_id: str, host: str, port: int, awake: Callable[[], Awaitable[None]]
    ) -> None:
        self.settings = settings
        self.engine_id = engine_id
        self.host = host
        self.port = port
        self.alive = True
        self.running = 0
        self.pool = Pool(settings.kv_blocks, settings.kv_blocks if settings.prefix_cache else 0)
        self.shaken: dict[str, float] = {}
        self.kept = 0
        self.awake = awake
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self._computing_until = 0.0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pushes(self) -> bool:
        return self.settings.mode is TransferMode.WRITE

    async def admit(self, count: int) -> list[int]:
        """A place among the running, and *count* blocks; first come, first served."""
        if not self._waiting and self.running < self.settings.max_num_seqs:
            blocks = self.pool.take(count)
            if blocks is not None:
                self.running += 1
                return blocks
        place: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        entry = (count, place)
        self._waiting.append(entry)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave(place.result())
            else:
                self._waiting.remove(entry)
                # The next may be smaller.
                self.look()
            raise

    def leave(self, blocks: Sequence[int]) -> None:
        """A request has ended; *blocks* are free."""
        self.running -= 1
        self.free(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.pool.give_back(blocks)
        self.look()

    def on_lease_end(self, lease: Lease) -> None:
        if lease.turn:
            self.kept -= len(lease.blocks)
        self.free(lease.blocks)

    def look(self) -> None:
        """Let in who fits."""
        while self._waiting and self.running < self.settings.max_num_seqs:
            count, place = self._waiting[0]
            if place.done():
                self._waiting.popleft()
                continue
            blocks = self.pool.take(count)
            if blocks is None:
                return
            self._waiting.popleft()
            self.running += 1
            place.set_result(blocks)

    async def compute(self, tokens: int) -> None:
        """Compute *tokens* of a prompt, after those that were there before."""
        rate = self.settings.prefill_tokens_per_second
        if tokens and rate != float("inf"):
            now = asyncio.get_running_loop().time()
            self._computing_until = max(now, self._computing_until) + tokens / rate
            await asyncio.sleep(self._computing_until - now)
        await self.awake()

    async def step(self, count: int = 1) -> None:
        """Make *count* tokens; prompts that are computed meanwhile are waited for."""
        seconds = self.settings.decode_step_seconds * count
        if seconds:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(max(seconds, self._computing_until - now))
        await self.awake()
