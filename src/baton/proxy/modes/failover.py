"""When an engine fails a request: again with others, as long as the client has heard nothing of the answer.

Each attempt has a prefill leg, a ticket and an id of its own: a ticket that a decode server may have seen is never
handed to another.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from baton.cluster import Role
from baton.proxy.attempts import OF_THE_TRANSFER, Attempts, Cause, Failure
from baton.proxy.errors import Fault
from baton.proxy.fleet import NoInstance
from baton.proxy.journey import Journey, State, Way, cause_of, untried

logger = logging.getLogger("baton.proxy")

T = TypeVar("T")


async def again(journey: Journey, way: Way, error: Fault, run: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What *run* brings in the end, whose first attempt has failed with *error*.

    Raises:
        EngineRefusal, ProxyError, StreamFailed: the last failure of an engine, when there is no further attempt.
    """
    attempts = journey.attempts = Attempts()
    failure = failure_of(error)
    while failure is not None:
        if journey.heard:
            mid_stream(journey, error)
        wait = plan(journey, way, attempts, failure)
        if wait is None:
            break
        note(journey, way, failure, error, wait)
        start_over(journey, attempts)
        if wait:
            await asyncio.sleep(wait)
        try:
            found = await run()
        except NoInstance:
            failure = Failure(failure.phase, Cause.NO_INSTANCE)
        except Fault as fault:
            error, failure = fault, failure_of(fault)
        else:
            way.metrics.failovers.inc()
            return found
    raise error


def mid_stream(journey: Journey, error: Fault) -> NoReturn:
    """An engine failed a request whose client has a part of the answer.

    The place for going on with it on another decode server, from the tokens that were delivered; for now the client is
    told that its answer is not whole.
    """
    raise error


def failure_of(error: Fault) -> Failure | None:
    """What failed, when trying again may help."""
    cause = cause_of(error)
    return None if cause is None or error.at is None else Failure(error.at, cause)


def plan(journey: Journey, way: Way, attempts: Attempts, failure: Failure) -> float | None:
    """Who is not asked again, and how many seconds to wait before the next attempt; None when there is none."""
    prefill, decode = journey.prefill, journey.decode
    failed = prefill if failure.phase is Role.PREFILL else decode
    if failed is not None:
        attempts.failed.add(failed.id)
    try:
        others = bool(untried(way.fleet.usable(failure.phase), attempts.failed))
    except NoInstance:
        others = False
    if failure.phase is Role.DECODE and failure.cause in OF_THE_TRANSFER - {Cause.BROKE} and prefill is not None:
        # It lives, and what it was handed may be why it failed.
        attempts.failed.add(prefill.id)
    left = journey.due - time.monotonic()
    return attempts.again(way.retries, failure, others=others, left=left, chance=random.random())  # noqa: S311 - jitter


def note(journey: Journey, way: Way, failure: Failure, error: Fault, wait: float) -> None:
    """Count and log that there is another attempt."""
    way.metrics.retries.inc(str(failure.phase), str(failure.cause))
    journey.retries += 1
    instance = journey.prefill if failure.phase is Role.PREFILL else journey.decode
    logger.warning(
        "%s failed %s (%s: %s), which is tried again%s",
        "no instance" if instance is None else instance.id,
        journey.request_id.decode(),
        failure.cause,
        error,
        f" in {wait:.2f} s" if wait else "",
    )


def start_over(journey: Journey, attempts: Attempts) -> None:
    """Nothing of the attempt before is left but its times and who has failed."""
    journey.state = State.ADMITTED
    journey.ticket = None
    # The next attempt may be the trial again.
    journey.end_trials()
    base = journey.request_id.partition(b"~")[0]
    journey.renamed(b"%b~%d" % (base, attempts.made))
