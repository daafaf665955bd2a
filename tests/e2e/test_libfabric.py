"""The KV cache over NIXL's LIBFABRIC backend, on libfabric's tcp provider: EFA's code path without its hardware."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import libfabric, tiny
from tests.e2e.engines import eventually
from tests.e2e.topology import Cluster, Engine, check, cluster, prompts, reference


@pytest.fixture(scope="module")
def pair(logs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    try:
        environ = libfabric.environ()
    except libfabric.Missing as error:
        pytest.skip(f"LIBFABRIC is NOT tested here: {error}")
    engine = Engine(("--transfer-backend", "LIBFABRIC"), environ=environ)
    model = tiny.llama(tmp_path_factory.mktemp("llama"))
    with cluster("libfabric", model, logs, prefill=(engine,), decode=(engine,)) as made:
        yield made


def test_the_text_is_one_servers_and_the_blocks_come_back(pair: Cluster) -> None:
    asked = prompts()
    check(pair, reference(pair.decode[0], asked), asked)
    (decode,) = pair.decode
    assert eventually(lambda: decode.metric("vllm:nixl_bytes_transferred_sum") > 0, True)
    assert decode.metric("vllm:nixl_num_failed_transfers_total") == 0


def test_the_backend_is_the_one_that_was_asked_for(pair: Cluster) -> None:
    """vLLM falls back on UCX in silence when a backend is not named right."""
    for server in (*pair.prefill, *pair.decode):
        log = server.log.read_text(errors="replace")
        assert "Backend LIBFABRIC was instantiated" in log
        assert "Backend UCX was instantiated" not in log
