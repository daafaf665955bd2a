"""One step of a whole model on vLLM's workers, by the ranks of a decode server and by one: a program of its own.

Run as ``python -m tests.engine.components.whole_model FOLDER KIND REPLICAS RANKS COMPONENT...``; it prints, for each
replica, the largest difference of its logits from one server's, and their size. There is no engine around the workers,
so attention has no cache: in its place stands a mixture of its inputs, head by head.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

ENVIRON = {
    "BATON_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ROWS = (5, 2)
"""Tokens of each replica."""


def main(folder: Path, kind: str, replicas: int, ranks: int, components: list[str]) -> None:
    import torch
    import torch.multiprocessing as processes

    from baton.engine import workarounds
    from baton.engine.settings import EngineSettings
    from tests.e2e import tiny
    from tests.ports import free_ports

    workarounds.apply(EngineSettings.read(os.environ))
    model = getattr(tiny, kind)(folder / kind)
    sizes = {f"{component}_dp_size": replicas for component in components}
    ports = free_ports(2)
    for name, port, (data, tensor) in (("shared", ports[0], (replicas, ranks)), ("one", ports[1], (1, 1))):
        config = configuration(model, data, tensor, sizes if data > 1 else {})
        work = (config, port, str(folder / name))
        processes.start_processes(step, work, nprocs=data * tensor, start_method="fork")
    one = torch.load(folder / "one0.pt")
    for replica in range(replicas):
        (made,) = torch.load(folder / f"shared{replica * ranks}.pt")
        print(float((made - one[replica]).abs().max()), float(one[replica].abs().max()))


def configuration(model: Path, data: int, tensor: int, sizes: dict[str, int]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        enable_expert_parallel=data > 1 and "moe" in model.name,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 24,
        additional_config={"baton_config": sizes},
        kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_consumer", "kv_buffer_device": "cpu"},  # type: ignore[arg-type]
    ).create_engine_config()
    config.kv_transfer_config = None
    return config


def step(rank: int, config: Any, port: int, out: str) -> None:
    """What one rank does; the first of a replica saves its logits."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.utils.import_utils import resolve_obj_by_qualname

    parallel = config.parallel_config
    replica, place = divmod(rank, parallel.tensor_parallel_size)
    config = copy.deepcopy(config)
    parallel = config.parallel_config
    parallel.data_parallel_rank = parallel.data_parallel_rank_local = parallel.data_parallel_index = replica
    parallel.data_parallel_master_ip, parallel.data_parallel_master_port = "127.0.0.1", port
    parallel._data_parallel_master_port_list, parallel._coord_store_port = [], 0
    with set_current_vllm_config(config), torch.inference_mode():
        worker = resolve_obj_by_qualname(parallel.worker_cls)(
            config, place, place, f"tcp://127.0.0.1:{port}", place == 0
        )
        worker.init_device()
        worker.load_model()
        mine = [replica] if parallel.data_parallel_size > 1 else range(len(ROWS))
        torch.save([logits(worker, config, each) for each in mine], f"{out}{rank}.pt")


def logits(worker: Any, config: Any, replica: int) -> Any:
    import torch
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    Attention.forward = mixture
    model, rows = worker.model_runner.model, ROWS[replica]
    tokens = torch.tensor([(11 + 7 * replica + 13 * each) % 250 for each in range(rows)], dtype=torch.int32)
    across = torch.tensor(ROWS, dtype=torch.int32) if config.parallel_config.data_parallel_size > 1 else None
    with set_forward_context(None, config, num_tokens=rows, num_tokens_across_dp=across):
        hidden = model(tokens, torch.arange(rows))
    return model.compute_logits(hidden)


def mixture(layer: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    """Of a token's own queries, keys and values: as many heads as there are queries."""
    heads, each = layer.num_heads, layer.num_heads // layer.num_kv_heads
    keys, values = (part.unflatten(1, (heads // each, -1)).repeat_interleave(each, 1) for part in (key, value))
    return (0.1 * query.unflatten(1, (heads, -1)) + 0.2 * keys + values).flatten(1)


if __name__ == "__main__":
    os.environ |= ENVIRON
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
