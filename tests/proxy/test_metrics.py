from __future__ import annotations

from baton.proxy.fleet import Fleet
from baton.proxy.metrics import Metrics


def test_a_histogram_is_cumulative_and_ends_with_everything() -> None:
    metrics = Metrics(Fleet([]))
    for seconds in (0.0005, 0.001, 0.002, 7.0, 1000.0):
        metrics.prefill_seconds.observe(seconds)
    lines = metrics.render().decode().splitlines()
    assert 'baton_prefill_seconds_bucket{le="0.001"} 2.0' in lines
    assert 'baton_prefill_seconds_bucket{le="0.0025"} 3.0' in lines
    assert 'baton_prefill_seconds_bucket{le="10"} 4.0' in lines
    assert 'baton_prefill_seconds_bucket{le="+Inf"} 5.0' in lines
    assert "baton_prefill_seconds_count 5.0" in lines
    assert "baton_prefill_seconds_sum 1007.0035" in lines


def test_requests_are_counted_by_endpoint_and_status() -> None:
    metrics = Metrics(Fleet([]))
    for status in (200, 200, 503):
        metrics.request("/v1/completions", status, 0.1)
    text = metrics.render().decode()
    assert 'baton_requests_total{endpoint="/v1/completions",status="200"} 2.0' in text
    assert 'baton_requests_total{endpoint="/v1/completions",status="503"} 1.0' in text
