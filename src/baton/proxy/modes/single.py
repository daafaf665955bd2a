"""A request for one answer, in the way that the fleet's transfer mode asks for."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from baton.cluster import TransferMode
from baton.proxy.errors import ProxyError
from baton.proxy.journey import Deliver, Journey, Way
from baton.proxy.modes.alone import run_or_alone
from baton.proxy.modes.read import run_read
from baton.proxy.modes.write import run_write
from baton.proxy.transfer_policy import OnNoTransfer


async def run_mixed(journey: Journey, way: Way, deliver: Deliver) -> None:
    """
    Raises:
        ProxyError: 503, the engines differ in transfer mode: nothing can be handed over.
    """
    raise ProxyError(503, way.fleet.conflict or "the engines differ in transfer mode", retry_after=1)


_RUNS = {TransferMode.READ: run_read, TransferMode.WRITE: run_write, None: run_mixed}


def run_single(journey: Journey, way: Way, deliver: Deliver) -> Coroutine[Any, Any, None]:
    """The run of a whole request for one answer, to be awaited.

    It raises:
        NoInstance: a pool is empty; nothing was sent.
        EngineRefusal: an engine answered with an error.
        ProxyError: a leg failed, or the fleet's engines cannot hand over to each other.
    """
    transfers, run = way.transfers, _RUNS[way.fleet.mode]
    transfers.expected += 1
    if transfers.policy is OnNoTransfer.FALLBACK:
        return run_or_alone(run, journey, way, deliver)
    return run(journey, way, deliver)
