"""What the proxy measures, from the arrival of a request. Prometheus, base units, prefix ``baton_``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.proxy.fleet import Fleet

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Seconds:
    """A histogram that costs half a microsecond an observation, since it is counted for every request.

    One thread counts and another may scrape: a count that is one behind is the worst that can be seen.
    """

    def __init__(self, name: str, documentation: str) -> None:
        self.name = name
        self.documentation = documentation
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def family(self) -> HistogramMetricFamily:
        """The counts so far, cumulative as Prometheus has them."""
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self.name, self.documentation)
        family.add_metric([], buckets, self._sum)
        return family


class _HistogramCollector(Collector):
    def __init__(self, histograms: Sequence[Seconds]) -> None:
        self._histograms = histograms

    def collect(self) -> Iterator[Metric]:
        for histogram in self._histograms:
            yield histogram.family()


class _FleetCollector(Collector):
    """Gauges read off the fleet when they are asked for, so that they cannot drift."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        labels = ["role", "instance"]
        usable = GaugeMetricFamily("baton_instance_usable", "1 when the instance is usable", labels=labels)
        in_flight = GaugeMetricFamily("baton_instance_in_flight", "Requests on the instance now", labels=labels)
        for instance in self._fleet:
            values = [str(instance.endpoint.role), instance.endpoint.authority]
            usable.add_metric(values, float(instance.usable))
            in_flight.add_metric(values, instance.in_flight)
        yield usable
        yield in_flight


class Metrics:
    """One registry a proxy."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_FleetCollector(fleet))
        # Looking a label up costs more than counting.
        self._by_status: dict[tuple[str, int], Counter] = {}
        self.requests = Counter(
            "baton_requests",
            "Requests by endpoint and the status they were answered with",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self.without_ticket = Counter(
            "baton_prefill_without_ticket",
            "Requests that prefill answered without a ticket: decode computed the prompt",
            registry=self.registry,
        )
        self.handed_off = Counter(
            "baton_handed_off", "Requests whose ticket a decode server accepted", registry=self.registry
        )
        self.stream_errors = Counter(
            "baton_stream_errors", "Streams that broke after their first byte", registry=self.registry
        )
        self.prefill_seconds = Seconds("baton_prefill_seconds", "From arrival to the prefill server's answer")
        self.first_byte_seconds = Seconds(
            "baton_first_byte_seconds", "From arrival to the head of the decode server's answer"
        )
        self.request_seconds = Seconds("baton_request_seconds", "From arrival to the last byte")
        histograms = (self.prefill_seconds, self.first_byte_seconds, self.request_seconds)
        self.registry.register(_HistogramCollector(histograms))

    def request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        key = (endpoint, status)
        counter = self._by_status.get(key)
        if counter is None:
            counter = self._by_status[key] = self.requests.labels(endpoint, status)
        counter.inc()
        self.request_seconds.observe(seconds)

    def render(self) -> bytes:
        return generate_latest(self.registry)
