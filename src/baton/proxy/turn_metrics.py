"""What a store of turns has counted, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from baton.proxy.turns import TurnStore, Why


def families(store: TurnStore) -> Iterator[Metric]:
    """Counters, and the size of the store as it is now."""
    store.sweep()
    yield CounterMetricFamily("baton_turns_kept", "Turns that a decode server keeps for the next request", store.kept)
    yield CounterMetricFamily("baton_turns_used", "Turns that a prefill leg was sent with", store.used)
    yield _by_reason("baton_turns_missed", "Requests of a conversation that had no turn to use", store.missed)
    yield _by_reason("baton_turns_dropped", "Turns that were thrown away unused", store.dropped)
    yield _by_reason("baton_client_tickets_ignored", "Clients' tickets that were not taken", store.ignored)
    yield GaugeMetricFamily("baton_turns_stored", "Turns in the store", value=len(store))


def _by_reason(name: str, documentation: str, counts: Mapping[Why, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=["reason"])
    for why, count in counts.items():
        family.add_metric([why], count)
    return family
