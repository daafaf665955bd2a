"""A lab with a client, for tests over real sockets on free ports."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp

from baton.sim import EngineSettings, Fault, Lab, specs
from baton.sim.check_cases import ASK
from baton.sim.text import Sampling, expected, tokens_of

PROMPT = "Once upon a time there was a fox that lived in a wood and had never seen a town, " * 3
BLOCK = 16


class Bench:
    """A running lab and what a proxy would do to it."""

    def __init__(self, lab: Lab, client: aiohttp.ClientSession) -> None:
        self.lab = lab
        self.client = client

    def url(self, engine: str) -> str:
        return self.lab.engines[engine].url

    async def post(
        self, engine: str, body: Any, path: str = "/v1/completions", headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status, and the body: JSON when it is that, else text."""
        async with self.client.post(self.url(engine) + path, json=body, headers=headers) as response:
            raw = await response.read()
            with contextlib.suppress(ValueError):
                return response.status, json.loads(raw)
            return response.status, raw.decode()

    async def get(self, engine: str, path: str) -> tuple[int, Any]:
        async with self.client.get(self.url(engine) + path) as response:
            raw = await response.read()
            with contextlib.suppress(ValueError):
                return response.status, json.loads(raw)
            return response.status, raw.decode()

    async def prefill(
        self, engine: str = "P0", prompt: str = PROMPT, request_id: str = "r", **more: Any
    ) -> dict[str, Any]:
        """The ticket for a prompt."""
        body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, "kv_transfer_params": ASK, **more}
        status, answer = await self.post(engine, body, headers={"x-request-id": request_id})
        assert status == 200, answer
        ticket = answer["kv_transfer_params"]
        assert ticket is not None
        return dict(ticket)

    async def decode(
        self, ticket: Any, engine: str = "D0", prompt: str = PROMPT, request_id: str = "r", **more: Any
    ) -> tuple[int, Any]:
        body = {"prompt": prompt, "max_tokens": 20, "ignore_eos": True, "kv_transfer_params": ticket, **more}
        return await self.post(engine, body, headers={"x-request-id": request_id})

    async def fault(self, *faults: str) -> None:
        await self.lab.set_faults([Fault.parse(each) for each in faults])

    def states(self) -> dict[str, int]:
        return dict(self.lab.ledger.counts)


def right(prompt: str = PROMPT, cap: int = 20) -> str:
    """The right answer to what :meth:`Bench.decode` asks."""
    return expected(tokens_of(prompt), Sampling(cap, ignore_eos=True), BLOCK).text


@contextlib.asynccontextmanager
async def bench(prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Bench]:
    lab = Lab(specs(prefill, decode, EngineSettings(**{"block_size": BLOCK, **settings})))
    await lab.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield Bench(lab, client)
    finally:
        await lab.stop()


def with_bench(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
    """Run *test* on a lab of its own."""

    async def go() -> None:
        async with bench(**options) as made:
            await test(made)

    asyncio.run(go())


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)
