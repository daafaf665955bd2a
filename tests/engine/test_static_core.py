"""Worker, runner and scheduler of static shapes in vLLM's engine core, on a model of two small layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine.static_core import LENGTHS

pytestmark = pytest.mark.e2e
"""It compiles eight graphs: a minute on two cores."""

VOCABULARY = 320
A_TO_F = range(64, 70)
"""Tokens of these letters."""


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    environ = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    environ |= {"BATON_ENGINE": "1", "BATON_STRICT_GRAPHS": "1"}
    argv = [sys.executable, "-m", "tests.engine.static_core", "2"]
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("TOLD "))
    return dict(json.loads(line.removeprefix("TOLD ")))


def test_every_step_has_the_size_of_a_bucket(told: dict[str, Any]) -> None:
    assert set(told["padded rows"]) == {1, 32, 64}
    # 65 and 100 tokens are chunks of 64 and the rest.
    assert {5, 31, 33, 36, 63} <= set(told["stock rows"])


def test_padding_changes_no_logit_and_no_block_but_the_null_block(told: dict[str, Any]) -> None:
    assert told["compare"]["foreign"] == 0
    # To the last bit.
    assert told["compare"]["cache"] == 0.0
    assert told["compare"]["logits"] == 0.0


@pytest.mark.parametrize("engine", ["padded", "graphs", "graphs again"])
@pytest.mark.parametrize("how", ["one by one", "together", "top-k 1", "logprobs"])
def test_text_is_the_stock_engines(told: dict[str, Any], engine: str, how: str) -> None:
    assert told[engine][how] == told["stock"]["one by one"]
    assert len(told["stock"]["one by one"]) == len(LENGTHS)


def test_text_of_a_decode_server_that_takes_the_cache_over_is_the_stock_engines(told: dict[str, Any]) -> None:
    handed = told["handed over"]
    assert handed["one by one"] == told["stock"]["one by one"]
    assert handed["together"] == told["stock"]["one by one"]
    # A prompt that it computed would have been an error: it has graphs for decode only, all from the store.
    assert handed["rows"] == [1, 4]
    assert handed["counts"] == [0, 6]


def test_text_of_a_decode_server_that_computes_prompts_without_graphs_is_the_stock_engines(
    told: dict[str, Any],
) -> None:
    computed = told["computed without graphs"]
    # The engines of one process share modules: what making graphs spoils is spoilt for the stock one as well.
    assert computed["one by one"] == told["before any graph"]
    assert computed["together"] == told["before any graph"]
    assert computed["rows"] == [1, 4, 32, 64]


def test_what_failed_to_come_is_computed_on_a_decode_server_and_text_is_the_stock_engines(told: dict[str, Any]) -> None:
    left = told["not all came"]
    assert left["one by one"] == told["before any graph"]
    assert left["together"] == told["before any graph"]
    # Decodes, and prompts of two sizes, which it has no graph for.
    assert left["rows"] == [1, 4, 32, 64]


@pytest.mark.parametrize("how", ["one by one", "together", "top-k 1"])
def test_text_of_an_engine_that_schedules_a_step_ahead_is_the_stock_engines(told: dict[str, Any], how: str) -> None:
    assert told["ahead"]["scheduler"] == "StaticAsyncScheduler"
    assert told["ahead"][how] == told["stock"]["one by one"]
    assert told["ahead"]["grammar"] == told["stock"]["grammar"]
    assert told["ahead"]["rows"] == [1, 4, 32, 64]
    assert told["ahead"]["counts"] == [0, 8]


@pytest.mark.parametrize("engine", ["padded", "graphs", "graphs again"])
def test_a_grammar_is_kept_to_beside_requests_without_one(told: dict[str, Any], engine: str) -> None:
    assert told[engine]["grammar"] == told["stock"]["grammar"]
    assert told[engine]["grammar"][::2] == told["stock"]["one by one"][::2]
    assert all(set(answer) <= set(A_TO_F) for answer in told[engine]["grammar"][1::2])


def test_a_seed_gives_the_stock_engines_tokens(told: dict[str, Any]) -> None:
    for engine in ("padded", "graphs", "graphs again"):
        assert told[engine]["seeded"] == told["stock"]["seeded"]


@pytest.mark.parametrize("engine", ["stock", "padded", "graphs", "graphs again"])
def test_a_seed_gives_the_same_tokens_when_the_prompt_is_computed_in_chunks(told: dict[str, Any], engine: str) -> None:
    assert told[engine]["seeded in chunks"] == told["seeded in one step"]


def test_a_second_start_compiles_nothing(told: dict[str, Any]) -> None:
    # One for all three layers of 64, 32, 4 and 1 rows; heads of 1 and 4 rows, greedy and drawn.
    assert told["graphs"]["counts"] == [8, 0]
    assert told["graphs again"]["counts"] == [0, 8]


def test_no_logits_leave_the_graph_unless_they_are_asked_for(told: dict[str, Any]) -> None:
    assert told["stock"]["widths"] == [VOCABULARY]
    assert told["graphs"]["widths"] == [0, VOCABULARY]
