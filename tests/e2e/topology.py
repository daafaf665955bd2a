"""Clusters of any shape for the tests of topologies: start them, ask them, and look whether all came back."""

from __future__ import annotations

import contextlib
import json
import random
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.engines import BATON, START_SECONDS, Server, eventually, generate, generate_all, start
from tests.ports import free_ports, free_range

BLOCK = 32
"""Tokens a KV block in these clusters: the least that attention on CPU takes."""

MODEL = "tiny"
FLAGS = (
    *("--served-model-name", MODEL, "--host", "127.0.0.1", "--dtype", "float32", "--block-size", str(BLOCK)),
    *("--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(1 << 26)),
    "--no-enable-prefix-caching",
)
TOKENS_OUT = 12
LENGTHS = (2, 3, 9, *(BLOCK * k + d for k in (1, 2, 4, 8, 12) for d in (-1, 0, 1)), 77, 150)
"""Of the 20 prompts, in tokens: around block boundaries, and some between."""


@dataclass(frozen=True)
class Engine:
    """One server of a cluster: flags beyond :data:`FLAGS`, and ports of its side channel (one a data-parallel rank)."""

    flags: Sequence[str] = ()
    side_channels: int = 1
    environ: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cluster:
    """Running servers; by role, each in the order in which it was asked for."""

    prefill: Sequence[Server]
    decode: Sequence[Server]
    proxy: Server


@contextlib.contextmanager
def cluster(
    name: str,
    model: Path,
    logs: Path,
    *,
    prefill: Sequence[Engine | Server] = (Engine(),),
    decode: Sequence[Engine | Server] = (Engine(),),
    proxy: Sequence[str] = (),
) -> Iterator[Cluster]:
    """A cluster of *model*, each part started by Baton's own command and healthy; stopped at the end.

    Args:
        name: of its log files.
        prefill, decode: engines to start, and servers that run already, which go on running.
        proxy: more flags of the proxy.
    """
    servers: list[Server] = []
    kept = [engine for engine in (*prefill, *decode) if isinstance(engine, Server)]
    try:
        for role, engines in (("prefill", prefill), ("decode", decode)):
            for index, engine in enumerate(engines):
                if isinstance(engine, Server):
                    servers.append(engine)
                    continue
                servers.append(start_engine(f"{name}-{role}{index}", model, role, engine, logs))
        (port,) = free_ports(1)
        ports = [str(server.port) for server in servers]
        argv = (*BATON, "proxy", "--port", str(port), *proxy)
        argv += ("--prefiller-ports", *ports[: len(prefill)], "--decoder-ports", *ports[len(prefill) :])
        servers.append(start(f"{name}-proxy", argv, port, logs))
        for server in servers:
            server.wait_healthy()
        assert eventually(lambda: untried_pairs(servers[-1]), 0, START_SECONDS) == 0
        yield Cluster(servers[: len(prefill)], servers[len(prefill) : -1], servers[-1])
    finally:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Server.stop, [server for server in servers if server not in kept]))


def start_engine(name: str, model: Path, role: str, engine: Engine, logs: Path) -> Server:
    """One server of *model*, started by Baton's own command; not yet healthy."""
    port, side = free_ports(1)[0], free_range(engine.side_channels)
    argv = (*BATON, "engine", str(model), "--role", role, "--port", str(port))
    argv += ("--side-channel-port", str(side), *FLAGS, *engine.flags)
    # More threads than cores would wait for each other in turns.
    return start(name, argv, port, logs, {"OMP_NUM_THREADS": "1", **engine.environ})


@contextlib.contextmanager
def pair_proxy(prefill: Server, decode: Server, logs: Path, *flags: str) -> Iterator[Server]:
    """A proxy of its own, with *flags*, over two servers of a cluster; it has warmed them up."""
    (port,) = free_ports(1)
    argv = (*BATON, "proxy", "--port", str(port), *flags, "--prefiller-ports", str(prefill.port))
    made = start(f"{prefill.name}-{decode.name}-{port}", (*argv, "--decoder-ports", str(decode.port)), port, logs)
    try:
        made.wait_healthy()
        assert eventually(lambda: untried_pairs(made), 0, START_SECONDS) == 0
        yield made
    finally:
        made.stop()


def untried_pairs(proxy: Server) -> int:
    """Pairs of engines that the proxy has not warmed up yet; 0 when it does not warm up."""
    with urllib.request.urlopen(f"{proxy.url}/health", timeout=30) as response:
        pairs = json.load(response).get("warm_up", {"pairs": 0, "tried": 0})
    return int(pairs["pairs"] - pairs["tried"])


def prompts(seed: int = 1) -> dict[str, list[int]]:
    """20 prompts of random printable tokens, by name; the same for the same *seed*."""
    chance = random.Random(seed)
    return {f"{length} tokens": [chance.randrange(10, 90) for _ in range(length)] for length in LENGTHS}


def answer(url: str, prompt: Sequence[int], **more: Any) -> str:
    """The greedy answer to one prompt, as text of its token ids' letters."""
    return generate(url, _asking(prompt, **more))


def answers(url: str, asked: Mapping[str, Sequence[int]], at_once: int = 1, **more: Any) -> dict[str, str]:
    """The answers to many prompts, *at_once* under way at a time, by name."""
    return generate_all(url, {name: _asking(prompt, **more) for name, prompt in asked.items()}, at_once)


def _asking(prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": list(prompt), "max_tokens": TOKENS_OUT, "ignore_eos": True, **more}


def reference(server: Server, asked: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """What one server answers when it does both phases itself; the answers follow their prompts."""
    made = answers(server.url, asked)
    assert len(set(made.values())) > len(made) // 2, f"the model hardly listens to its prompts: {made}"
    return made


def used_kv(servers: Sequence[Server]) -> float:
    """The share of the KV cache in use, summed over *servers*."""
    return sum(server.metric("vllm:kv_cache_usage_perc") for server in servers)


def check(cluster: Cluster, expected: Mapping[str, str], asked: Mapping[str, Sequence[int]], **more: Any) -> None:
    """The proxy's answers are *expected*, one after the other and 8 at once, and every block is free afterwards."""
    for at_once in (1, 8):
        assert answers(cluster.proxy.url, asked, at_once, **more) == expected
    assert eventually(lambda: used_kv([*cluster.prefill, *cluster.decode]), 0.0) == 0.0
