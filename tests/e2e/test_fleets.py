"""Several prefill and decode servers: any prefill server hands over to any decode server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import eventually, post
from tests.e2e.topology import (
    BLOCK,
    MODEL,
    Cluster,
    Engine,
    answers,
    check,
    cluster,
    pair_proxy,
    prompts,
    reference,
    used_kv,
)

BLOCK_BYTES = BLOCK * 4 * 2 * 4 * 32 * 4
"""Tokens x layers x (K and V) x KV heads x head size x bytes."""


@dataclass(frozen=True)
class Warm:
    """A fleet, and what each decode server had done before anybody asked for anything.

    Attributes:
        transfers, moved: pulls of KV cache, and their bytes.
        handshakes: prefill servers that it has met.
    """

    fleet: Cluster
    transfers: list[float]
    moved: list[float]
    handshakes: list[int]


def transfers(fleet: Cluster) -> list[float]:
    return [decode.metric("vllm:nixl_bytes_transferred_count") for decode in fleet.decode]


def handshakes(fleet: Cluster) -> list[int]:
    """What each decode server's log says of them."""
    return [decode.log.read_text(errors="replace").count("NIXL compatibility check passed") for decode in fleet.decode]


@pytest.fixture(scope="module")
def warm(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("fleet", model, logs, prefill=(Engine(),) * 2, decode=(Engine(),) * 2) as made:
        pulled = eventually(lambda: transfers(made), [2.0, 2.0])
        moved = [decode.metric("vllm:nixl_bytes_transferred_sum") for decode in made.decode]
        yield Warm(made, pulled, moved, handshakes(made))


@pytest.fixture(scope="module")
def fleet(warm: Warm) -> Cluster:
    return warm.fleet


def test_every_decode_server_has_met_every_prefill_server_before_the_first_request(warm: Warm) -> None:
    """And meets nobody anew when requests come, whichever pair serves them."""
    assert warm.handshakes == [2, 2]
    assert warm.transfers == [2.0, 2.0]
    assert min(warm.moved) >= 2 * BLOCK_BYTES
    for _ in range(5):
        code, _, _ = post(
            f"{warm.fleet.proxy.url}/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 2}
        )
        assert code == 200
    assert eventually(lambda: sum(transfers(warm.fleet)), 9.0) == 9.0
    assert handshakes(warm.fleet) == [2, 2]
    assert warm.fleet.proxy.metric("baton_warm_up_failures_total") == 0


def test_the_text_is_one_servers_whoever_serves_it(fleet: Cluster) -> None:
    asked = prompts()
    check(fleet, reference(fleet.decode[0], asked), asked)


def test_both_pools_go_round(fleet: Cluster) -> None:
    """Each by itself: who served a request is said in its answer."""
    before, used = transfers(fleet), {"x-baton-prefill": set(), "x-baton-decode": set()}
    for _ in range(4):
        body = {"model": MODEL, "prompt": list(range(20, 60)), "max_tokens": 2}
        code, headers, _ = post(f"{fleet.proxy.url}/v1/completions", body)
        assert code == 200
        for header, names in used.items():
            names.add(headers[header])
    assert used == {"x-baton-prefill": {"P0", "P1"}, "x-baton-decode": {"D0", "D1"}}
    expected = [count + 2 for count in before]
    assert eventually(lambda: transfers(fleet), expected) == expected
    assert fleet.proxy.metric("baton_prefill_without_ticket_total") == 0


def test_every_pair_hands_over(fleet: Cluster, logs: Path) -> None:
    """One pair at a time behind a proxy of its own, so that it is known who served: the text is right on each."""
    asked = dict(list(prompts(seed=3).items())[::3])
    expected = reference(fleet.decode[0], asked)
    for prefill, (place, decode) in product(fleet.prefill, enumerate(fleet.decode)):
        with pair_proxy(prefill, decode, logs, "--no-warm-up") as proxy:
            before = transfers(fleet)
            assert answers(proxy.url, asked, 4) == expected
            after = [count + (len(asked) if each == place else 0) for each, count in enumerate(before)]
            assert eventually(lambda: transfers(fleet), after) == after
    assert eventually(lambda: used_kv([*fleet.prefill, *fleet.decode]), 0.0) == 0.0
