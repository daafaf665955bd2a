"""What the proxy measures, from the arrival of a request. Prometheus, base units, prefix ``baton_``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.proxy.fleet import Fleet

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


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
        self.prefill_seconds = Histogram(
            "baton_prefill_seconds",
            "From arrival to the prefill server's answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.first_byte_seconds = Histogram(
            "baton_first_byte_seconds",
            "From arrival to the first byte of the decode server's answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.request_seconds = Histogram(
            "baton_request_seconds", "From arrival to the last byte", buckets=_SECONDS, registry=self.registry
        )

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
