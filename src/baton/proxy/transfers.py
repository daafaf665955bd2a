"""What became of the hand-offs: how many were meant, why some were none, and what engines say that they moved."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, Metric

from baton.http import Header
from baton.proxy.engine_counts import EngineCounts
from baton.proxy.errors import ProxyError
from baton.proxy.fleet import Fleet, ProxyInstance
from baton.proxy.transfer_policy import Cause, OnNoTransfer, Reason
from baton.proxy.upstream import Upstream

logger = logging.getLogger("baton.proxy")

SCRAPE_SECONDS = 2.0
"""Limit for one engine's ``/metrics``."""
MOST_BYTES = 1 << 24
REMEMBER_SECONDS = 30.0
"""How long after the last request without a transfer it is named as a reason."""


@dataclass(slots=True)
class Recent:
    """What is wrong with an instance's requests right now."""

    reason: Reason
    at: float


class Transfers:
    """The one owner of these counts.

    Args:
        policy: as the user asked; None is FAIL until the proxy was ready once, and WARN from then on.

    Attributes:
        expected: requests that were meant to be handed over.
        causes: of those that were not.
        engines: the last counts of each engine, by instance id.
        suspects: instances that gave no ticket: their pairs are proven anew.
        suspect_pairs: prefill and decode servers between which a hand-off failed: they are proven anew, too.
    """

    def __init__(self, policy: OnNoTransfer | None = None) -> None:
        self.policy = policy
        self.expected = 0
        self.causes: dict[Cause, int] = {}
        self.engines: dict[str, EngineCounts] = {}
        self.suspects: set[str] = set()
        self.suspect_pairs: set[tuple[str, str]] = set()
        self._recent: dict[str, Recent] = {}

    def count(self, cause: Cause) -> None:
        """A request that was meant to be handed over was not."""
        self.causes[cause] = self.causes.get(cause, 0) + 1

    def without_ticket(self, instance: ProxyInstance, request_id: bytes) -> None:
        """A prefill server was asked for a ticket and gave none.

        Raises:
            ProxyError: 503, the user wants no request that is not handed over.
        """
        self.count(Cause.NO_TICKET)
        self.suspects.add(instance.id)
        message = f"{instance.id} gives no tickets: decode servers compute its prompts"
        self._recent[instance.id] = Recent(Reason(Cause.NO_TICKET, (instance.id,), message), time.monotonic())
        if self.policy is OnNoTransfer.FALLBACK:
            return
        logger.warning(
            "%s gave no ticket for %s: %s",
            instance.id,
            request_id.decode(),
            "it is refused" if self.policy is OnNoTransfer.FAIL else "the decode server computes the prompt itself",
        )
        if self.policy is OnNoTransfer.FAIL:
            raise ProxyError(503, "the prefill server handed nothing over (--on-no-transfer fail)", retry_after=1)

    def reasons(self) -> list[Reason]:
        """What is wrong with requests right now."""
        now = time.monotonic()
        self._recent = {name: each for name, each in self._recent.items() if now - each.at < REMEMBER_SECONDS}
        return [each.reason for each in self._recent.values()]

    async def scrape(self, fleet: Fleet, upstream: Upstream, headers: Sequence[Header]) -> None:
        """Read the counts of every usable engine, all at once."""
        usable = [instance for instance in fleet if instance.usable]
        found = await asyncio.gather(*(counts_of(upstream, instance, headers) for instance in usable))
        for instance, counts in zip(usable, found, strict=True):
            if counts is not None:
                before = self.engines.get(instance.id)
                if before is not None and counts.failures > before.failures:
                    self.suspects.add(instance.id)
                self.engines[instance.id] = counts
        known = {instance.id for instance in fleet}
        self.engines = {name: counts for name, counts in self.engines.items() if name in known}

    def families(self) -> Iterator[Metric]:
        """As Prometheus has them."""
        yield CounterMetricFamily(
            "baton_transfer_expected", "Requests that were meant to be handed over", value=self.expected
        )
        none = CounterMetricFamily(
            "baton_no_transfer", "Requests that were meant to be handed over and were not, by cause", labels=["cause"]
        )
        for cause, count in list(self.causes.items()):
            none.add_metric([cause], count)
        yield none
        for name, what, field in (
            ("baton_transfer_bytes", "Bytes of KV caches that the engine has moved, as it says itself", "moved_bytes"),
            ("baton_transfer_seconds", "Time that its transfers took, as it says itself", "seconds"),
            ("baton_transfer_operations", "Transfers that it has done: one a rank of a request", "transfers"),
            ("baton_transfer_failures", "Transfers and handshakes that failed, as it says itself", "failures"),
            ("baton_transfer_expired", "Requests whose blocks nobody fetched in time, as it says itself", "expired"),
            ("baton_transfer_refused", "Tickets and reads that it would not use", "refused"),
        ):
            family = CounterMetricFamily(name, what, labels=["instance"])
            for instance, counts in list(self.engines.items()):
                family.add_metric([instance], getattr(counts, field))
            yield family


async def counts_of(upstream: Upstream, instance: ProxyInstance, headers: Sequence[Header]) -> EngineCounts | None:
    """What an engine counts; None when it does not say."""
    try:
        async with asyncio.timeout(SCRAPE_SECONDS), upstream.get(instance, b"/metrics", headers) as response:
            if response.status != 200:
                return None
            return EngineCounts.parse((await response.read())[:MOST_BYTES])
    except Exception as error:
        # Nothing that an engine may say here, or not say, is worth more than a missing count.
        logger.debug("%s does not tell its counts: %r", instance.id, error)
        return None
