"""What connectors need of the process that they are in."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.ports import free_ports


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """What a worker needs of its process; and the process as it was, since a worker binds it to a core."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    cores, (port,) = os.sched_getaffinity(0), free_ports(1)
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    os.sched_setaffinity(0, cores)
