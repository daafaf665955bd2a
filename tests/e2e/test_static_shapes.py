"""Static shapes on real engines: padding changes nothing, roles make their own graphs, text is the stock one's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import tiny
from tests.e2e.engines import BATON, eventually, start
from tests.e2e.static_probe import LENGTHS
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


def probe(model: Path, folder: Path, mode: str) -> dict[str, Any]:
    import torch

    out = folder / f"{mode}.pt"
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    argv = [sys.executable, "-m", "tests.e2e.static_probe", str(model), str(out), mode]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(torch.load(out))


def test_padding_changes_no_logit_and_writes_to_the_null_block_alone(model: Path, tmp_path: Path) -> None:
    import torch

    stock, padded = probe(model, tmp_path, "stock"), probe(model, tmp_path, "padded")
    assert set(padded["rows"]) <= {1, 32, 64, 128}
    assert {5, 31, 33, 63, 65, 100, 127} <= set(stock["rows"])
    for length, expected, got in zip(LENGTHS, stock["seen"], padded["seen"], strict=True):
        assert got["tokens"] == expected["tokens"], length
        torch.testing.assert_close(got["logits"], expected["logits"], rtol=1e-5, atol=1e-4, msg=f"{length} tokens")
        # Layers, then blocks; block 0 is the null block.
        theirs, ours = expected["cache"][:, 1:], got["cache"][:, 1:]
        touched = theirs.flatten(2).abs().sum(dim=(0, 2)) > 0
        assert torch.equal(ours[:, ~touched], theirs[:, ~touched]), f"{length} tokens: a foreign block was written to"
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=f"KV of {length} tokens")


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
