"""Several prefill and decode servers: any prefill server hands over to any decode server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import post
from tests.e2e.topology import MODEL, Cluster, Engine, check, cluster, prompts, reference


@pytest.fixture(scope="module")
def fleet(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("fleet", model, logs, prefill=(Engine(),) * 2, decode=(Engine(),) * 2) as made:
        yield made


def test_the_text_is_one_servers_whoever_serves_it(fleet: Cluster) -> None:
    asked = prompts()
    check(fleet, reference(fleet.decode[0], asked), asked)


def test_every_pair_hands_over(fleet: Cluster) -> None:
    """Both pools go round, each by itself: nine requests are enough to see all four pairs."""
    pairs = set()
    prompt = list(range(20, 60))
    for _ in range(9):
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        code, headers, _ = post(f"{fleet.proxy.url}/v1/completions", body)
        assert code == 200
        pairs.add((headers["x-baton-prefill"], headers["x-baton-decode"]))
    assert pairs <= set(product(("P0", "P1"), ("D0", "D1")))
    for decode in fleet.decode:
        assert decode.metric("vllm:nixl_bytes_transferred_sum") > 0
    assert fleet.proxy.metric("baton_prefill_without_ticket_total") == 0
