"""What ``--on-no-transfer fallback`` does without a usable prefill server: decode alone computes the prompt."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from baton.cluster import Role
from baton.proxy.answers import Prefilled
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import NoInstance
from baton.proxy.journey import Deliver, Journey, Way, decode
from baton.proxy.transfer_policy import Cause

Run = Callable[[Journey, Way, Deliver], Coroutine[Any, Any, None]]


async def run_or_alone(run: Run, journey: Journey, way: Way, deliver: Deliver) -> None:
    """*run* a request; when that fails for the want of a prefill server, have its decode server do all of it.

    Raises:
        NoInstance, EngineRefusal, ProxyError: as *run*, or as the decode leg.
    """
    try:
        await run(journey, way, deliver)
        return
    except NoInstance as error:
        if error.role is not Role.PREFILL:
            raise
    except ProxyError as error:
        # Of the prefill leg: cannot be reached, broke off, took too long.
        if error.at is not Role.PREFILL or error.status not in (502, 503, 504):
            raise
    way.transfers.count(Cause.NO_PREFILL)
    journey.prefill = None
    if journey.decode is None:
        journey.decode = way.decode_policy.pick(way.fleet.usable(Role.DECODE))
    journey.on_trial(journey.decode)
    if journey.on_prefilled is not None:
        # No prefill leg will be answered: whoever waits for it goes the same way.
        journey.on_prefilled()
    await decode(journey, way, Prefilled(None, {}), deliver)
