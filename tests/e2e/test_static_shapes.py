"""Static shapes on real engines: padding changes nothing, roles make their own graphs, text is the stock one's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import BATON, eventually, start
from tests.e2e.topology import FLAGS, Cluster, Engine, answer, answers, check, cluster, prompts, reference
from tests.ports import free_ports

BUCKETS = '{"baton_config": {"num_batched_tokens_buckets": [32, 128], "num_seqs_buckets": [2, 8]}}'
STATIC = ("--max-num-batched-tokens", "128", "--additional-config", BUCKETS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of graphs that is empty at first."""
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture(scope="module")
def static(model: Path, graphs: Path, logs: Path) -> Iterator[Cluster]:
    """1P1D with static shapes, and a stock decode server beside it; a step without a graph is an error on P."""
    environ = {"BATON_GRAPH_CACHE": str(graphs)}
    strict = environ | {"BATON_STRICT_GRAPHS": "1"}
    with cluster(
        "static",
        model,
        logs,
        prefill=(Engine(STATIC, environ=strict),),
        decode=(Engine(STATIC, environ=environ), Engine()),
    ) as made:
        yield made


@pytest.fixture(scope="module")
def expected(static: Cluster) -> dict[str, str]:
    """What the stock server answers when it computes the prompts itself."""
    return reference(static.decode[1], prompts())


def test_text_through_the_hand_off_is_the_stock_servers(static: Cluster, expected: dict[str, str]) -> None:
    check(static, expected, prompts())


def test_text_of_a_static_server_alone_is_the_stock_servers(static: Cluster, expected: dict[str, str]) -> None:
    for at_once in (1, 8):
        assert answers(static.decode[0].url, prompts(), at_once) == expected


def test_each_role_makes_its_own_graphs_only(static: Cluster) -> None:
    told = [server.log.read_text() for server in (*static.prefill, static.decode[0])]
    assert "prefill bucket 128" in told[0] and "decode bucket" not in told[0]
    assert "decode bucket 8" in told[1] and "prefill bucket" not in told[1]


def test_steps_their_phase_and_their_padding_are_metrics(static: Cluster, expected: dict[str, str]) -> None:
    (prefill,), decode = static.prefill, static.decode[0]
    before = {name: prefill.metric(f"baton_step_prefill{name}_total") for name in ("s", "_tokens", "_padded_tokens")}
    asked = {"model": "tiny", "max_tokens": 1}
    answer(prefill.url, [20] * 40, **asked)

    def more() -> list[float]:
        return [prefill.metric(f"baton_step_prefill{name}_total") - value for name, value in before.items()]

    assert eventually(more, [1, 40, 128]) == [1, 40, 128]
    assert prefill.metric("baton_step_uncompiled_total") == 0
    # Decode steps of one request are padded to two rows.
    tokens, padded = (decode.metric(f"baton_step_decode_{name}_total") for name in ("tokens", "padded_tokens"))
    assert 0 < tokens < padded


def test_sampling_by_temperature_seed_and_logprobs_works_beside_greedy(static: Cluster) -> None:
    decode = static.decode[0]
    greedy = answer(decode.url, [20] * 40)
    assert answer(decode.url, [20] * 40, temperature=0.8, top_k=1) == greedy
    seeded = [answer(decode.url, [20] * 40, temperature=1.5, top_k=50, seed=7) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert answer(decode.url, [20] * 40, logprobs=2) == greedy
    assert "a request asks for a seed" in decode.log.read_text()


def test_a_second_start_compiles_nothing(static: Cluster, model: Path, graphs: Path, logs: Path) -> None:
    port, side = free_ports(2)
    argv = (*BATON, "engine", str(model), "--role", "decode", "--port", str(port), "--side-channel-port", str(side))
    environ = {"OMP_NUM_THREADS": "1", "BATON_GRAPH_CACHE": str(graphs)}
    again = start("static-again", (*argv, *FLAGS, *STATIC), port, logs, environ)
    try:
        again.wait_healthy()
        said = next(line for line in again.log.read_text().splitlines() if "static shapes: ready with" in line)
        assert "0 graphs compiled" in said
        assert answers(again.url, prompts(), 4) == answers(static.decode[1].url, prompts(), 4)
    finally:
        again.stop()


@pytest.mark.parametrize("flag", ["--num-gpu-blocks-override"])
def test_preemption_and_chunks_under_a_small_cache_keep_the_text(
    flag: str, model: Path, graphs: Path, logs: Path, static: Cluster
) -> None:
    port, side = free_ports(2)
    argv = (*BATON, "engine", str(model), "--role", "decode", "--port", str(port), "--side-channel-port", str(side))
    environ = {"OMP_NUM_THREADS": "1", "BATON_GRAPH_CACHE": str(graphs)}
    small = start("static-small", (*argv, *FLAGS, *STATIC, flag, "18"), port, logs, environ)
    asked = {f"r{number}": [10 + (3 * place + number) % 80 for place in range(90)] for number in range(8)}
    try:
        small.wait_healthy()
        got = answers(small.url, asked, 8, max_tokens=80)
        assert got == answers(static.decode[1].url, asked, 8, max_tokens=80)
        assert small.metric("vllm:num_preemptions_total") > 0
    finally:
        small.stop()
