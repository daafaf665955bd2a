"""Requests for several answers: a journey for each, with a ticket of its own, and one answer for the client."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from baton.http import Responder
from baton.proxy.deliver import Joined, all_or_none
from baton.proxy.fleet import ProxyInstance
from baton.proxy.journey import Journey, Way
from baton.proxy.modes.single import run_single
from baton.proxy.samples import Part


async def run_several(journey: Journey, made: Sequence[Part], way: Way, responder: Responder) -> None:
    """All parts of a request.

    Samples of one prompt follow the first of them to its prefill server once that has computed the prompt: it
    finds the KV cache there. The first part that fails ends the rest.

    Raises:
        NoInstance, EngineRefusal, ProxyError: as one part did.
    """
    whole = Joined(way, responder, journey, made)
    firsts: dict[int, asyncio.Future[ProxyInstance | None]] = {
        part.prompt: asyncio.get_running_loop().create_future() for part in made
    }

    async def run(part: Part, leads: bool) -> None:
        own = journey.part(part)
        first = firsts[part.prompt]

        def prefilled() -> None:
            # Once: a prompt that is computed again leaves the others where they are.
            if not first.done():
                first.set_result(own.prefill)

        if leads:
            own.on_prefilled = prefilled
        else:
            own.prefill = await asyncio.shield(first)
        try:
            await run_single(own, way, partial(whole.take, part.index))
            # Whatever way it went, the others go on.
            prefilled()
        finally:
            own.book(None)
            own.end_trials()
            journey.retries += own.retries

    leading = {part.prompt: part.index for part in reversed(made)}
    await all_or_none([run(part, leading[part.prompt] == part.index) for part in made])
    whole.finish()
