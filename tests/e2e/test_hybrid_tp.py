"""Prefill and decode servers of different tensor parallel sizes: all four pairs of 1 and 2 ranks, asked pair by pair.

Two models: one whose four key-value heads are split between ranks, and one whose only one is held by both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e import tiny
from tests.e2e.engines import Server, eventually, post
from tests.e2e.topology import MODEL, Cluster, Engine, answer, cluster, prompts, reference, used_kv

LEASE_SECONDS = 30.0
"""vLLM's: after it, blocks of a prefill rank that nobody told come back all the same."""

SIZES = (1, 2)
ENGINES = tuple(Engine(("--tensor-parallel-size", str(size))) for size in SIZES)


@pytest.fixture(scope="module", params=[4, 1], ids=["4-heads", "1-head"])
def sizes(request: pytest.FixtureRequest, logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    kv_heads: int = request.param
    model = tiny.llama(tmp_path_factory.mktemp("llama"), kv_heads=kv_heads)
    with cluster(f"hybrid-tp-{kv_heads}", model, logs, prefill=ENGINES, decode=ENGINES) as made:
        yield made


@pytest.fixture(scope="module")
def expected(sizes: Cluster) -> dict[str, str]:
    """What the decode server with one rank answers when it computes the prompts itself."""
    return reference(sizes.decode[0], prompts())


def hand_over(prefill: Server, decode: Server, prompt: Sequence[int]) -> str:
    """The answer of *decode* with the KV cache of *prefill*, the two asked as the proxy asks them."""
    ask = {"model": MODEL, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    ask["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    code, _, raw = post(f"{prefill.url}/v1/completions", ask)
    assert code == 200, raw[:1000]
    return answer(decode.url, prompt, kv_transfer_params=json.loads(raw)["kv_transfer_params"])


def hand_over_all(prefill: Server, decode: Server, asked: Mapping[str, Sequence[int]], at_once: int) -> dict[str, str]:
    def one(prompt: Sequence[int]) -> str:
        return hand_over(prefill, decode, prompt)

    with ThreadPoolExecutor(at_once) as pool:
        return dict(zip(asked, pool.map(one, asked.values()), strict=True))


def moved(decode: Server) -> Callable[[], float]:
    return lambda: decode.metric("vllm:nixl_bytes_transferred_sum")


@pytest.mark.parametrize("decode_size", SIZES)
@pytest.mark.parametrize("prefill_size", SIZES)
def test_the_text_is_one_servers_and_every_rank_frees_its_blocks(
    sizes: Cluster, expected: Mapping[str, str], prefill_size: int, decode_size: int
) -> None:
    prefill, decode = sizes.prefill[prefill_size - 1], sizes.decode[decode_size - 1]
    before = moved(decode)()
    for at_once in (1, 8):
        assert hand_over_all(prefill, decode, prompts(), at_once) == expected
        # Told by every reader, a rank frees at once: far from the lease's end, which would free them too.
        began = time.monotonic()
        assert eventually(lambda: used_kv([prefill, decode]), 0.0, LEASE_SECONDS) == 0.0
        assert time.monotonic() - began < LEASE_SECONDS / 2
    assert eventually(lambda: moved(decode)() > before, True, LEASE_SECONDS)
    for server in (prefill, decode):
        assert server.metric("vllm:nixl_num_kv_expired_reqs_total") == 0
        assert server.metric("vllm:nixl_num_failed_transfers_total") == 0
        assert server.metric("vllm:nixl_num_failed_notifications_total") == 0
