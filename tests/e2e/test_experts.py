"""Experts spread over the ranks of a decode server (expert parallelism), behind a plain prefill server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import Server, eventually, post
from tests.e2e.topology import (
    MODEL,
    TOKENS_OUT,
    Cluster,
    Engine,
    check,
    cluster,
    prompts,
    reference,
    used_kv,
)

SPREAD = ("--data-parallel-size", "2", "--enable-expert-parallel")
SPLIT = ("--tensor-parallel-size", "2", "--enable-expert-parallel")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.qwen3_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def spread(logs: Path, model: Path) -> Iterator[Cluster]:
    with cluster("dp-ep", model, logs, decode=(Engine(SPREAD, side_channels=2),)) as made:
        yield made


@pytest.fixture(scope="module")
def one_servers(spread: Cluster) -> dict[str, str]:
    """What the prefill server, which has all experts, answers when it does both phases."""
    return reference(spread.prefill[0], prompts())


def test_experts_may_be_spread_over_tensor_parallel_ranks(logs: Path, model: Path) -> None:
    """First, and stopped at once: there are two cores."""
    with cluster("tp-ep", model, logs, decode=(Engine(SPLIT),)) as made:
        asked = dict(list(prompts().items())[::3])
        check(made, reference(made.prefill[0], asked), asked)


def test_experts_may_be_spread_over_both_kinds_of_ranks(logs: Path, model: Path) -> None:
    """Four workers, each with a quarter of the experts; also stopped at once."""
    engine = Engine((*SPREAD, "--tensor-parallel-size", "2"), side_channels=2)
    with cluster("tp-dp-ep", model, logs, decode=(engine,)) as made:
        asked = dict(list(prompts().items())[::4])
        check(made, reference(made.prefill[0], asked), asked)
        (decode,) = made.decode
        for rank in "01":
            assert eventually(lambda rank=rank: decode.metric("vllm:nixl_bytes_transferred_sum", engine=rank) > 0, True)  # type: ignore[misc]


def answered(server: Server) -> list[float]:
    """How many requests each of two ranks has finished."""
    return [server.metric("vllm:request_success_total", engine=str(rank)) for rank in (0, 1)]


def test_the_text_is_one_servers_whatever_the_ranks_batches(spread: Cluster, one_servers: dict[str, str]) -> None:
    """One after the other: a rank works and the other one steps along idle. 8 at once: batches of all sizes."""
    check(spread, one_servers, prompts())
    (decode,) = spread.decode
    assert min(eventually(lambda: [count > 0 for count in answered(decode)], [True, True])), "a rank had no request"
    moved, both = "vllm:nixl_bytes_transferred_sum", [True, True]
    assert eventually(lambda: [decode.metric(moved, engine=rank) > 0 for rank in "01"], both) == both
    used = "vllm:kv_cache_usage_perc"
    assert eventually(lambda: [decode.metric(used, engine=rank) for rank in "01"], [0, 0]) == [0, 0]
    assert spread.proxy.metric("baton_prefill_without_ticket_total") == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_client_may_name_the_rank_that_decodes(spread: Cluster, one_servers: dict[str, str], rank: int) -> None:
    (decode,) = spread.decode
    # Counters come late: once the last request's blocks are free, it is counted too.
    assert eventually(lambda: used_kv([decode]), 0.0) == 0.0
    before = answered(decode)
    for name, prompt in list(prompts().items())[:3]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True}
        code, _, raw = post(f"{spread.proxy.url}/v1/completions", body, {"X-data-parallel-rank": str(rank)})
        assert code == 200, raw
        assert json.loads(raw)["choices"][0]["text"] == one_servers[name]
    wanted = [before[each] + (3 if each == rank else 0) for each in (0, 1)]
    assert eventually(lambda: answered(decode), wanted) == wanted


@pytest.mark.parametrize("rank", ["2", "-1", "one"])
def test_a_rank_that_is_none_is_refused(spread: Cluster, rank: str) -> None:
    body = {"model": MODEL, "prompt": [20, 30], "max_tokens": 1}
    code, _, raw = post(f"{spread.proxy.url}/v1/completions", body, {"X-data-parallel-rank": rank})
    assert code == 400, raw
    assert rank in json.loads(raw)["error"]["message"]
    # Nothing was computed for it, so that no lease has to end.
    assert eventually(lambda: used_kv(spread.prefill), 0.0, 15.0) == 0.0
