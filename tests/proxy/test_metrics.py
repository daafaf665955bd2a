from __future__ import annotations

import pytest

from baton.cluster import Endpoint, Role
from baton.proxy.admission import Gate
from baton.proxy.fleet import Fleet
from baton.proxy.journey import Times
from baton.proxy.metrics import Metrics


def test_a_histogram_is_cumulative_and_ends_with_everything() -> None:
    metrics = Metrics(Fleet([]), Gate())
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
    metrics = Metrics(Fleet([]), Gate())
    for status in (200, 200, 503):
        metrics.request("/v1/completions", status, 0.1)
    text = metrics.render().decode()
    assert 'baton_requests_total{endpoint="/v1/completions",status="200"} 2.0' in text
    assert 'baton_requests_total{endpoint="/v1/completions",status="503"} 1.0' in text


def test_the_parts_of_the_time_to_the_first_token_are_all_of_it() -> None:
    metrics = Metrics(Fleet([]), Gate())
    metrics.split(Times(1.0, 1.5, 1.6, 3.0, 3.2, 3.3, 4.0))
    text = metrics.render().decode()
    sums = {
        line.split('part="')[1].split('"')[0]: float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("baton_ttft_part_seconds_sum")
    }
    assert sums == pytest.approx(
        {"queue": 0.5, "prefill": 1.4, "hand_off": 0.1, "first_token": 0.7, "overhead": 0.3}, abs=1e-9
    )
    assert "baton_ttft_seconds_sum 3.0" in text


def test_an_answer_in_one_piece_has_no_first_token() -> None:
    metrics = Metrics(Fleet([]), Gate())
    metrics.split(Times(1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 0.0))
    text = metrics.render().decode()
    assert "baton_ttft_seconds_count 0.0" in text
    assert "baton_prefill_seconds_count 1.0" in text


def test_the_metrics_of_several_workers_add_up() -> None:
    endpoints = [Endpoint(role=Role.PREFILL, host="h", port=1), Endpoint(role=Role.DECODE, host="h", port=2)]
    made = []
    for number in (1, 2):
        fleet = Fleet(endpoints)
        metrics = Metrics(fleet, Gate())
        for instance in fleet:
            instance.usable = instance.endpoint.role is Role.PREFILL or number == 1
            instance.in_flight = number
        for _ in range(number):
            metrics.request("/v1/completions", 200, 0.002)
        metrics.request("/v1/completions", 500 + number, 0.002)
        made.append(metrics)
    lines = made[0].render([made[1].render()]).decode().splitlines()
    assert 'baton_requests_total{endpoint="/v1/completions",status="200"} 3.0' in lines
    assert 'baton_requests_total{endpoint="/v1/completions",status="501"} 1.0' in lines
    assert 'baton_requests_total{endpoint="/v1/completions",status="502"} 1.0' in lines
    assert 'baton_request_seconds_bucket{le="0.0025"} 5.0' in lines
    assert "baton_request_seconds_count 5.0" in lines
    assert 'baton_in_flight{instance="h:1",role="prefill"} 3.0' in lines
    assert 'baton_instance_usable{instance="h:1",role="prefill"} 1.0' in lines
    assert 'baton_instance_usable{instance="h:2",role="decode"} 0.0' in lines
    assert [line for line in lines if line.startswith("# TYPE baton_requests")] == [
        "# TYPE baton_requests_total counter"
    ]
