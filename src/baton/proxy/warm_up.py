"""Warming up pairs: the first hand-off of a prefill and a decode server costs a NIXL handshake, so the proxy does it.

One small hand-off for each pair, before `/health` is good and again when one of the two comes back after it was out.
Nothing is routed otherwise for it: a request that comes meanwhile is served.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.cluster import Role
from baton.http import ClientError, Header
from baton.proxy import legs
from baton.proxy.answers import failed
from baton.proxy.errors import JSON, ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.journey import Way
from baton.proxy.release import LINGER_SECONDS
from baton.proxy.ticket import Ticket
from baton.proxy.upstream import Answer, read_answer
from baton.proxy.workers import Peers

logger = logging.getLogger("baton.proxy")

PATH = "/v1/completions"
STRAGGLER_SECONDS = 10.0
"""How long the first round waits for engines that have not come up, once there is one of each role."""
SLOW_SECONDS = 5.0
RETRY_SECONDS = 2.0
"""Until a pair that failed is tried again, four times longer each time: on a busy machine a handshake can miss vLLM's
own limit of 5 s (0.32, nixl/base_worker.py), and then the client that comes next would be the one to fail."""
TRIES = 4
SHOWN = 200
"""Characters of an engine's refusal that are logged."""

Pair = tuple[ProxyInstance, ProxyInstance]


class Failed(Exception):
    """A pair did not hand over; the message says which engine said what."""


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
        """Whether the first round is over: every pair was tried once, those aside whose engines stay away."""
        if not self._over:
            known = list(pairs(self._way.fleet))
            open_pairs = [pair for pair in known if key(pair) not in self._tried]
            waited = self._ready_since is not None and time.monotonic() - self._ready_since > STRAGGLER_SECONDS
            self._over = not open_pairs or (waited and not self._running and not any(map(both_usable, open_pairs)))
        return self._over

    def counts(self) -> dict[str, int]:
        """Pairs that are known, and how many of them were tried."""
        known = [key(pair) for pair in pairs(self._way.fleet)]
        return {"pairs": len(known), "tried": sum(each in self._tried for each in known)}

    async def close(self) -> None:
        """Cut what is under way."""
        self._closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _is_due(self, pair: Pair) -> bool:
        if not both_usable(pair):
            return False
        if self._tried.get(key(pair)) != starts(pair):
            return True
        failures, at = self._again.get(key(pair), (TRIES, 0.0))
        return failures < TRIES and time.monotonic() >= at

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task]
        self.look()

    async def _try(self, pair: Pair) -> None:
        """Warm one pair up, whatever comes of it; counts and logs."""
        prefill, decode = pair
        tried, started, reason = starts(pair), time.monotonic(), None
        try:
            async with asyncio.timeout(self._pair_seconds):
                await hand_over(self._way, prefill, decode, self._headers)
        except TimeoutError:
            reason = f"not done after {self._pair_seconds:g} s"
        except (Failed, ProxyError, ClientError) as error:
            reason = str(error)
        except Exception as error:
            # Whatever an engine answers: health must not wait for a pair for ever.
            logger.exception("a warm-up broke")
            reason = repr(error)
        failures, _ = self._again.pop(key(pair), (0, 0.0))
        failures = 0 if self._tried.get(key(pair)) != tried else failures
        self._tried[key(pair)] = tried
        assert self._round is not None
        self._round.tried += 1
        seconds = time.monotonic() - started
        if reason is not None:
            self._round.failed += 1
            self._again[key(pair)] = failures + 1, time.monotonic() + RETRY_SECONDS * 4**failures
            self._way.metrics.warm_up_failures.inc()
            logger.warning("warm-up of %s to %s failed: %s", prefill.id, decode.id, reason)
        elif seconds > SLOW_SECONDS:
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


async def hand_over(way: Way, prefill: ProxyInstance, decode: ProxyInstance, headers: Sequence[Header]) -> None:
    """Have *prefill* compute a short prompt that no cache holds, and *decode* fetch it and make one token.

    Raises:
        Failed: one of them refused, or gave no ticket.
        ProxyError: one of them cannot be reached, broke off or took too long.
    """
    rules = legs.RULES[PATH]
    prompt = secrets.token_hex(16)
    body = {"model": await model_of(way, prefill, headers), "prompt": prompt, "max_tokens": 1, "temperature": 0}
    both = [JSON, *headers, (b"x-request-id", b"warm-up-" + secrets.token_hex(8).encode())]

    # prefill
    raw = legs.written(legs.prefill_leg(body, rules))
    async with way.upstream.post(prefill, PATH.encode(), both, (raw,)) as response:
        ticket = Ticket.from_answer(good(prefill, await read_answer(response)), time.monotonic())
    if ticket is None:
        raise Failed(f"{prefill.id} gave no ticket: is it started as a prefill server, with a KV connector?")

    # decode
    pieces = legs.decode_body(legs.written(body), ticket, keep_blocks=False)
    async with way.upstream.post(decode, PATH.encode(), both, pieces, linger_seconds=LINGER_SECONDS) as response:
        good(decode, await read_answer(response))


async def model_of(way: Way, instance: ProxyInstance, headers: Sequence[Header]) -> str:
    """The first model that an engine names.

    Raises:
        Failed: it names none.
        ProxyError: it cannot be reached, or broke off.
    """
    async with way.upstream.get(instance, b"/v1/models", headers) as response:
        value = good(instance, await read_answer(response))
    try:
        return str(value["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise Failed(f"{instance.id} names no model at /v1/models") from None


def good(instance: ProxyInstance, answer: Answer) -> Any:
    """An engine's answer, read.

    Raises:
        Failed: it is a refusal, says that generation failed, or is not JSON.
    """
    if answer.status != 200 or failed(answer.body):
        hint = ": it asks for a key, see --engine-api-key" if answer.status == 401 else ""
        raise Failed(f"{instance.id} answered {answer.status}{hint}: {answer.body.decode(errors='replace')[:SHOWN]}")
    try:
        return orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        raise Failed(f"{instance.id} answered what is not JSON") from None
