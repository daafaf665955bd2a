"""What the proxy measures, from the arrival of a request. Prometheus, base units, prefix ``baton_``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from baton.cluster import Role
from baton.proxy.admission import Gate
from baton.proxy.fleet import Fleet
from baton.proxy.outstanding import Outstanding
from baton.proxy.transfers import Transfers
from baton.proxy.turn_metrics import families
from baton.proxy.turns import TurnStore

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
PARTS = ("queue", "prefill", "hand_off", "first_token", "overhead")
"""What the time to the first token of a stream is made of; together they are all of it."""


class Seconds:
    """A histogram that costs half a microsecond an observation, since it is counted for every request.

    One thread counts and another may scrape: a count that is one behind is the worst that can be seen.
    """

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """The counts so far, cumulative as Prometheus has them."""
        bounds = [*map(str, _SECONDS), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class Count:
    """A counter that costs a dictionary's access, for the same reason."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str] = ()) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._values: dict[tuple[str, ...], int] = {} if labels else {(): 0}

    def inc(self, *values: str) -> None:
        self._values[values] = self._values.get(values, 0) + 1

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, count in list(self._values.items()):
            family.add_metric(values, count)
        return family


class Marks(Protocol):
    """When a request passed each mark (see :class:`baton.proxy.journey.Times`)."""

    arrived: float
    admitted: float
    prefill_sent: float
    prefilled: float
    decode_sent: float
    decode_head: float
    first_event: float


class Metrics(Collector):
    """All metrics of a proxy, counted by hand since they are counted often."""

    def __init__(
        self,
        fleet: Fleet,
        gate: Gate,
        *,
        decode_gate: Gate | None = None,
        turns: TurnStore | None = None,
        outstanding: Outstanding | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self._fleet = fleet
        self._gate = gate
        self._gates = [gate] if decode_gate is None else [gate, decode_gate]
        self._turns = turns
        self._outstanding = Outstanding() if outstanding is None else outstanding
        self._transfers = transfers
        self.request_seconds = Seconds()
        self.prefill_seconds = Seconds()
        self.inter_token_seconds = Seconds()
        self.ttft_seconds = Seconds()
        self.parts = {part: Seconds() for part in PARTS}
        self.requests = Count(
            "baton_requests",
            "Requests by endpoint and the status they were answered with; a stream that broke has its error's",
            ["endpoint", "status"],
        )
        self.failed = Count(
            "baton_failed_requests", "Requests that ended with an error, by the state they were in", ["state"]
        )
        self.cancelled = Count(
            "baton_cancelled_requests", "Requests whose client left, by the state they were in", ["state"]
        )
        self.without_ticket = Count(
            "baton_prefill_without_ticket",
            "Requests that prefill answered without a ticket: decode computed the prompt",
        )
        self.handed_off = Count("baton_handed_off", "Tickets that a decode server accepted")
        self.retries = Count(
            "baton_retries",
            "Further attempts at requests, by the leg that had failed and why",
            ["phase", "cause"],
        )
        self.failovers = Count("baton_failovers", "Requests that an engine failed and a further attempt answered")
        self.stream_errors = Count("baton_stream_errors", "Streams that broke after their head")
        self.warm_up_failures = Count("baton_warm_up_failures", "Pairs whose warm-up hand-off failed")
        self.reloads = Count("baton_instances_file_reloads", "Reads of a changed file of instances", ["result"])

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests.inc(endpoint, str(status))
        self.request_seconds.observe(seconds)

    def split(self, times: Marks) -> None:
        """Count where the time of one request went until its first token."""
        if not times.prefilled:
            return
        prefill = times.prefilled - times.prefill_sent
        self.prefill_seconds.observe(prefill)
        if not times.first_event:
            return
        queue = times.admitted - times.arrived
        # In write mode the decode leg runs beside the prefill leg: what counts is the rest of it.
        handed = max(times.decode_sent, times.prefilled)
        head = max(times.decode_head, handed)
        hand_off = head - handed
        first_token = times.first_event - head
        whole = times.first_event - times.arrived
        self.ttft_seconds.observe(whole)
        parts = self.parts
        parts["queue"].observe(queue)
        parts["prefill"].observe(prefill)
        parts["hand_off"].observe(hand_off)
        parts["first_token"].observe(first_token)
        parts["overhead"].observe(whole - queue - prefill - hand_off - first_token)

    def collect(self) -> Iterator[Metric]:
        """Histograms, and gauges read off their owners when they are asked for, so that they cannot drift."""
        for count in (
            self.requests,
            self.failed,
            self.cancelled,
            self.without_ticket,
            self.handed_off,
            self.retries,
            self.failovers,
            self.stream_errors,
            self.warm_up_failures,
            self.reloads,
        ):
            yield count.family()
        for name, documentation, seconds in (
            ("baton_request_seconds", "From arrival to the last byte", self.request_seconds),
            ("baton_prefill_seconds", "The prefill leg, from its dispatch to its answer", self.prefill_seconds),
            ("baton_ttft_seconds", "Streams: from arrival to the first event", self.ttft_seconds),
            ("baton_inter_token_seconds", "Streams: between two reads of events", self.inter_token_seconds),
        ):
            family = HistogramMetricFamily(name, documentation)
            seconds.add_to(family, [])
            yield family
        split = HistogramMetricFamily(
            "baton_ttft_part_seconds", "Streams: the parts of baton_ttft_seconds", labels=["part"]
        )
        for part, seconds in self.parts.items():
            seconds.add_to(split, [part])
        yield split
        yield from instance_families(self._fleet)
        yield GaugeMetricFamily("baton_active_requests", "Requests under way", value=self._gate.active)
        waiting = sum(each.waiting for each in self._gates)
        yield GaugeMetricFamily("baton_queued_requests", "Requests in line for a place", value=waiting)
        yield from self._tickets()
        if self._turns is not None:
            yield from families(self._turns)
        if self._transfers is not None:
            yield from self._transfers.families()

    def _tickets(self) -> Iterator[Metric]:
        """Of each prefill server, by its address."""
        tickets, labels = self._outstanding, ["instance"]
        out = GaugeMetricFamily("baton_tickets_outstanding", "Tickets of a prefill server not yet used", labels=labels)
        oldest = GaugeMetricFamily("baton_ticket_oldest_seconds", "Age of the oldest of them", labels=labels)
        counts = [
            (CounterMetricFamily(f"baton_tickets_{what}", documentation, labels=labels), counted)
            for what, documentation, counted in (
                ("given", "Tickets that prefill servers gave", tickets.given),
                ("used", "Tickets whose KV cache a decode server had", tickets.used),
                ("dropped", "Tickets not used, whose blocks a decode server was to have freed", tickets.dropped),
                ("expired", "Tickets left to the end of their lease", tickets.expired),
            )
        ]
        for instance in self._fleet.pools[Role.PREFILL]:
            values = [instance.endpoint.authority]
            out.add_metric(values, tickets.count(instance.id))
            oldest.add_metric(values, tickets.oldest_seconds(instance.id))
            for family, counted in counts:
                family.add_metric(values, counted[instance.id])
        yield out
        yield oldest
        for family, _ in counts:
            yield family

    def render(self, others: Iterable[bytes] = ()) -> bytes:
        """The text of all metrics, with those of other workers added.

        Args:
            others: what their own :meth:`render` gave.
        """
        own = generate_latest(self)
        texts = [own, *others]
        return own if len(texts) == 1 else generate_latest(_Sum(texts))


def instance_families(fleet: Fleet) -> Iterator[Metric]:
    """What is known of each instance, and of pairs that have failed."""
    labels = ["role", "instance"]
    usable = GaugeMetricFamily("baton_instance_usable", "1 when the instance is usable", labels=labels)
    state = GaugeMetricFamily(
        "baton_instance_state",
        "0 usable (breaker closed), 1 out (breaker open, or it does not answer), 2 half-open, 3 draining, 4 drained",
        labels=labels,
    )
    in_flight = GaugeMetricFamily("baton_in_flight", "Requests on the instance now", labels=labels)
    probes = CounterMetricFamily("baton_probes_failed", "Health questions that went wrong", labels=labels)
    ejections = CounterMetricFamily(
        "baton_ejections",
        "How often the instance was taken out: its probes failed, it could not be connected to, requests failed on it, "
        "hand-offs failed because of it",
        labels=[*labels, "reason"],
    )
    for instance in fleet:
        values = [str(instance.endpoint.role), instance.endpoint.authority]
        usable.add_metric(values, float(instance.usable))
        state.add_metric(values, instance.state().number)
        in_flight.add_metric(values, instance.in_flight)
        probes.add_metric(values, instance.probes_failed)
        for reason, count in instance.ejections.items():
            ejections.add_metric([*values, reason], count)
    pairs = CounterMetricFamily("baton_pair_failures", "Hand-offs that failed", labels=["prefill", "decode"])
    where = {instance.id: instance.endpoint.authority for instance in fleet}
    for (prefill, decode), count in fleet.pairs.failed.items():
        pairs.add_metric([where.get(prefill, prefill), where.get(decode, decode)], count)
    return iter((usable, state, in_flight, probes, ejections, pairs))


_LEAST, _MOST = frozenset({"baton_instance_usable"}), frozenset({"baton_instance_state", "baton_ticket_oldest_seconds"})


class _Sum:
    """The metrics of several workers as one: counts are added, and an instance is as the least content of them says."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for text in self._texts:
            for family in text_string_to_metric_families(text.decode()):
                families.setdefault(family.name, family)
                known = values.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sorted(sample.labels.items())))
                    if key not in known:
                        known[key] = sample.value
                    elif family.name in _LEAST:
                        known[key] = min(known[key], sample.value)
                    elif family.name in _MOST:
                        known[key] = max(known[key], sample.value)
                    else:
                        known[key] += sample.value
        for name, family in families.items():
            made = Metric(name, family.documentation, family.type)
            for (sample_name, labels), value in values[name].items():
                made.add_sample(sample_name, dict(labels), value)
            yield made
