"""Warming up pairs: the first hand-off of a prefill and a decode server costs a NIXL handshake, so the proxy does it.

One small hand-off for each pair, before `/health` is good and again when one of the two comes back after it was out, or
when its requests are not handed over. It must really move a KV cache (`proof.py`): a pair that does not is a reason not
to be ready, in words. Nothing is routed otherwise for it: a request that comes meanwhile is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.cluster import Role
from baton.http import ClientError, Header
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.journey import Way
from baton.proxy.proof import Proof, cause_of_error, hand_over
from baton.proxy.transfer_policy import Cause, Failed, OnNoTransfer, Reason
from baton.proxy.workers import Peers

logger = logging.getLogger("baton.proxy")

STRAGGLER_SECONDS = 10.0
"""How long the first round waits for engines that have not come up, once there is one of each role."""
SLOW_SECONDS = 5.0
RETRY_SECONDS = 2.0
"""Until a pair that failed is tried again, four times longer each time: on a busy machine a handshake can miss vLLM's
own limit of 5 s (0.32, nixl/base_worker.py), and then the client that comes next would be the one to fail."""
TRIES = 4
LONGEST_RETRY_SECONDS = 30.0
"""Unless ``--on-no-transfer`` is lenient a pair is tried until it works, but no further apart than this."""
SUSPECT_SECONDS = 10.0
"""Between two proofs of a pair whose requests are not handed over."""

REASONS_PATH = "/reasons"
"""Where workers ask the first one why pairs are not proven."""

Pair = tuple[ProxyInstance, ProxyInstance]


@dataclass
class Round:
    """Warm-ups under way together.

    Attributes:
        started: on the monotonic clock.
        tried, failed: how many pairs so far.
    """

    started: float
    tried: int = 0
    failed: int = 0


class WarmUp:
    """The warm-ups of one proxy: at most one at a time on each engine.

    Args:
        way: the fleet, its connections and its metrics.
        headers: what engines are given besides the body: their key.
        pair_seconds: limit for one pair.
    """

    def __init__(self, way: Way, headers: Sequence[Header], pair_seconds: float) -> None:
        self._way = way
        self._headers = list(headers)
        self._pair_seconds = pair_seconds
        # Which start of each of the two was tried; how often it failed, and when it is tried again.
        self._tried: dict[tuple[str, str], tuple[int, int]] = {}
        self._again: dict[tuple[str, str], tuple[int, float]] = {}
        # What came of it last: a proof, or why there is none.
        self._found: dict[tuple[str, str], Proof | Reason] = {}
        self._proved_at: dict[tuple[str, str], float] = {}
        self._running: dict[asyncio.Task[None], Pair] = {}
        self._round: Round | None = None
        self._ready_since: float | None = None
        self._over = False
        self._closed = False

    def look(self) -> None:
        """Start what is to be done and can be started; to be called whenever an instance may have come up."""
        if self._closed:
            return
        if self._ready_since is None and self._way.fleet.ready():
            self._ready_since = time.monotonic()
        busy = {instance.id for pair in self._running.values() for instance in pair}
        self._doubt_suspects()
        self._forget_removed()
        for pair in pairs(self._way.fleet):
            prefill, decode = pair
            if not self._is_due(pair) or prefill.id in busy or decode.id in busy:
                continue
            busy |= {prefill.id, decode.id}
            if self._round is None:
                self._round = Round(time.monotonic())
                logger.info("warming up: one small hand-off for each new pair")
            task = asyncio.create_task(self._try(pair))
            self._running[task] = pair
            task.add_done_callback(self._on_done)
        if self._round is not None and not self._running:
            done, self._round = self._round, None
            took = time.monotonic() - done.started
            logger.info("warmed up: %d pairs in %.1f s, %d failed", done.tried, took, done.failed)

    async def ready(self) -> bool:
        """Whether the first round is over, and what it found is good enough for ``--on-no-transfer``.

        Every pair was tried once, those aside whose engines stay away. Unless it says otherwise, every pair of usable
        engines must have handed over by then; what happens later is a reason (:meth:`reasons`), and no more than that
        without ``fail``.
        """
        policy = self._way.transfers.policy
        if not self._over:
            known = list(pairs(self._way.fleet))
            open_pairs = [pair for pair in known if key(pair) not in self._tried]
            waited = self._ready_since is not None and time.monotonic() - self._ready_since > STRAGGLER_SECONDS
            tried = not open_pairs or (waited and not self._running and not any(map(both_usable, open_pairs)))
            self._over = tried and (self._lenient() or all(map(self._is_good, filter(both_usable, known))))
        if policy is not OnNoTransfer.FAIL or not self._over:
            return self._over
        return any(self._is_good(pair) for pair in pairs(self._way.fleet) if both_usable(pair))

    def _lenient(self) -> bool:
        return self._way.transfers.policy in (OnNoTransfer.WARN, OnNoTransfer.FALLBACK)

    def _is_good(self, pair: Pair) -> bool:
        found = self._found.get(key(pair))
        if self._way.transfers.policy is OnNoTransfer.FAIL:
            return found is Proof.PROVEN
        return isinstance(found, Proof)

    def _doubt_suspects(self) -> None:
        """Have pairs proven anew whose requests were not handed over; each at most so often."""
        suspects, suspect_pairs = self._way.transfers.suspects, self._way.transfers.suspect_pairs
        for pair in pairs(self._way.fleet) if suspects or suspect_pairs else ():
            last = self._proved_at.get(key(pair), 0.0)
            suspected = key(pair) in suspect_pairs or suspects & set(key(pair))
            if suspected and time.monotonic() - last > SUSPECT_SECONDS:
                self._tried.pop(key(pair), None)
        suspects.clear()
        suspect_pairs.clear()

    def _forget_removed(self) -> None:
        """Keep nothing of pairs that are no more: ids never come back."""
        known = {key(pair) for pair in pairs(self._way.fleet)}
        tables: tuple[dict[tuple[str, str], Any], ...] = (self._tried, self._again, self._found, self._proved_at)
        for table in tables:
            for gone in table.keys() - known:
                del table[gone]

    def counts(self) -> dict[str, int]:
        """Pairs that are known, how many of them were tried, and what came of it."""
        known = [key(pair) for pair in pairs(self._way.fleet)]
        found = [self._found.get(each) for each in known]
        return {
            "pairs": len(known),
            "tried": sum(each in self._found for each in known),
            "proven": found.count(Proof.PROVEN),
            "unproven": found.count(Proof.UNPROVEN),
            "failed": sum(isinstance(each, Reason) for each in found),
        }

    async def reasons(self) -> list[dict[str, Any]]:
        """Why this or that is not handed over, now."""
        fleet = self._way.fleet
        away = [each for each in fleet if not each.usable]
        found = [
            Reason(
                Cause.WRONG_ENDPOINT,
                (each.id,),
                f"{each.id} at {each.endpoint.url} does not answer /health as it should: is it up, and is that its "
                "address?",
            )
            for each in away
        ]
        for pair in pairs(fleet):
            each = self._found.get(key(pair))
            if isinstance(each, Reason) and both_usable(pair):
                found.append(each)
        return [each.said() for each in (*found, *self._way.transfers.reasons())]

    async def close(self) -> None:
        """Cut what is under way."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _is_due(self, pair: Pair) -> bool:
        now = time.monotonic()
        if not all(each.usable or each.admits(now) for each in pair):
            return False
        if not both_usable(pair):
            # A hand-off is the trial of what is half-open: no client may come, as long as it is not well.
            return now >= self._again.get(key(pair), (0, 0.0))[1]
        if self._tried.get(key(pair)) != starts(pair):
            return True
        failures, at = self._again.get(key(pair), (0, 0.0))
        # What is a reason not to be ready, or said to be wrong, is looked at until it is well.
        return failures > 0 and (failures < TRIES or not self._lenient()) and now >= at

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.look()

    async def _try(self, pair: Pair) -> None:
        """Warm one pair up, whatever comes of it; counts and logs."""
        prefill, decode = pair
        tried, started, cause, reason = starts(pair), time.monotonic(), Cause.BROKEN, None
        proof, fleet = Proof.UNPROVEN, self._way.fleet
        trials = [trial for each in pair if not each.usable for trial in each.try_now()]
        try:
            async with asyncio.timeout(self._pair_seconds):
                proof = await hand_over(self._way, prefill, decode, self._headers)
        except TimeoutError:
            cause, reason = Cause.TOO_SLOW, f"not done after {self._pair_seconds:g} s"
        except Failed as error:
            cause, reason = error.cause, str(error)
        except ProxyError as error:
            cause, reason = cause_of_error(error), str(error)
        except ClientError as error:
            reason = str(error)
        except Exception as error:
            # Whatever an engine answers: health must not wait for a pair for ever.
            logger.exception("a warm-up broke")
            reason = repr(error)
        finally:
            for breaker, since in trials:
                breaker.give_up(since)
        if reason is None:
            fleet.pair_worked(prefill, decode)
        elif trials:
            fleet.pair_failed(prefill, decode, reason)
        failures, _ = self._again.pop(key(pair), (0, 0.0))
        failures = 0 if self._tried.get(key(pair)) != tried else failures
        self._tried[key(pair)], self._proved_at[key(pair)] = tried, time.monotonic()
        unproven_before = self._found.get(key(pair)) is Proof.UNPROVEN
        self._found[key(pair)] = proof if reason is None else Reason(cause, key(pair), reason)
        assert self._round is not None
        self._round.tried += 1
        seconds = time.monotonic() - started
        if reason is not None:
            self._round.failed += 1
            wait = min(RETRY_SECONDS * 4 ** min(failures, TRIES), max(LONGEST_RETRY_SECONDS, RETRY_SECONDS))
            self._again[key(pair)] = failures + 1, time.monotonic() + wait
            self._way.metrics.warm_up_failures.inc()
            logger.warning("warm-up of %s to %s failed: %s", prefill.id, decode.id, reason)
            return
        if proof is Proof.UNPROVEN and not unproven_before:
            logger.info(
                "%s to %s works, but whether a KV cache is moved nobody can know: the engines do not count it",
                prefill.id,
                decode.id,
            )
        if seconds > SLOW_SECONDS:
            logger.info("warm-up of %s to %s took %.1f s", prefill.id, decode.id, seconds)


class FirstWorkers:
    """What a worker knows of the warm-up that the first one does for all: handshakes are the engines' own.

    Args:
        first: the Unix socket of that worker.
    """

    def __init__(self, first: str) -> None:
        self._peer = Peers((first,))
        self._over = False

    async def ready(self) -> bool:
        """Whether the first worker has once said that it is ready."""
        self._over = self._over or bool(await self._peer.ask("/health"))
        return self._over

    def look(self) -> None:
        """Nothing is to be done here."""

    def counts(self) -> dict[str, int] | None:
        return None

    async def reasons(self) -> list[dict[str, Any]]:
        """What the first worker finds."""
        said = await self._peer.ask(REASONS_PATH)
        return list(orjson.loads(said[0])["reasons"]) if said else []

    async def close(self) -> None:
        self._peer.close()


def pairs(fleet: Fleet) -> list[Pair]:
    """Every prefill with every decode server, in such an order that neighbours share no engine where that can be."""
    prefills, decodes = fleet.pools[Role.PREFILL], fleet.pools[Role.DECODE]
    count = max(len(prefills), len(decodes))
    made = [
        (prefills[place], decodes[(place + turn) % count])
        for turn in range(count)
        for place in range(len(prefills))
        if (place + turn) % count < len(decodes)
    ]
    assert len(made) == len(prefills) * len(decodes)
    return made


def key(pair: Pair) -> tuple[str, str]:
    return pair[0].id, pair[1].id


def starts(pair: Pair) -> tuple[int, int]:
    """How often each of the two has come up."""
    return pair[0].came_up, pair[1].came_up


def both_usable(pair: Pair) -> bool:
    return pair[0].usable and pair[1].usable
