"""A request for one answer, in the way that the fleet's transfer mode asks for."""

from __future__ import annotations

from collections.abc import Coroutine
from functools import partial
from typing import Any

from baton.cluster import TransferMode
from baton.proxy.errors import Fault, ProxyError
from baton.proxy.journey import Deliver, Journey, Way, prefill_alone
from baton.proxy.modes.alone import run_or_alone
from baton.proxy.modes.failover import again
from baton.proxy.modes.read import run_read
from baton.proxy.modes.write import run_write
from baton.proxy.transfer_policy import OnNoTransfer
from baton.proxy.upstream import Answer


async def run_mixed(journey: Journey, way: Way, deliver: Deliver) -> None:
    """
    Raises:
        ProxyError: 503, the engines differ in transfer mode: nothing can be handed over.
    """
    raise ProxyError(503, way.fleet.conflict or "the engines differ in transfer mode", retry_after=1)


_RUNS = {TransferMode.READ: run_read, TransferMode.WRITE: run_write, None: run_mixed}


def run_single(journey: Journey, way: Way, deliver: Deliver) -> Coroutine[Any, Any, None]:
    """A whole request for one answer, to be awaited. No coroutine itself: each is woken up three times a request.

    Raises:
        NoInstance: a pool is empty; nothing was sent.
        EngineRefusal, StreamFailed: an engine answered with an error.
        ProxyError: a leg failed, or the fleet's engines cannot hand over to each other.
    """
    transfers = way.transfers
    transfers.expected += 1
    if transfers.policy is OnNoTransfer.FALLBACK:
        return run_or_alone(_run, journey, way, deliver)
    return _run(journey, way, deliver)


async def _run(journey: Journey, way: Way, deliver: Deliver) -> None:
    """The same through both phases, with other instances when some fail it."""
    try:
        await _RUNS[way.fleet.mode](journey, way, deliver)
    except Fault as error:
        await again(journey, way, error, lambda: _RUNS[way.fleet.mode](journey, way, deliver))


async def run_prefill_alone(journey: Journey, way: Way) -> Answer:
    """A whole request for its prompt alone, with nothing to be generated.

    Raises:
        NoInstance, EngineRefusal, ProxyError: as :func:`run_single`.
    """
    try:
        return await prefill_alone(journey, way)
    except Fault as error:
        return await again(journey, way, error, partial(prefill_alone, journey, way))
