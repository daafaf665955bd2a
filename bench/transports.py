#!/usr/bin/env python3
"""How fast NIXL moves KV blocks between two processes of this host, by UCX transport and number of NIXL threads.

Two agents with plain memory, as two engines on CPU have; the reader pulls blocks as vLLM does in read mode: prepared
descriptor lists, one descriptor a block and layer, block numbers in no order. The yardstick is one thread that copies
the same blocks with memmove inside one process. Settings take turns over the rounds; medians. UCX reads its
environment once, so each setting is a pair of processes. Run nothing else meanwhile.

usage: python bench/transports.py [--rounds 5] [--reads 5] [--write]
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from baton.engine.settings import DEFAULT_NIXL_NAP_US
from baton.engine.workarounds import napping_agent
from baton.launch.transports import CPU_THREADS, CPU_TLS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
FROM, TO = "<!-- from bench/transports.py -->", "<!-- to here: transports -->"
LAYERS = 30
TOKEN_BYTES = 2 * 3 * 64 * 4
"""A layer's: K and V, 3 heads of 64 (SmolLM2-135M), in float32."""
MEMCPY = "memcpy, one thread"
LIMIT_SECONDS = 120


@dataclass(frozen=True)
class Case:
    """What one read moves: *blocks* of *tokens* tokens in every layer."""

    blocks: int
    tokens: int

    @property
    def block_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    @property
    def size(self) -> int:
        return self.blocks * self.block_bytes * LAYERS

    def __str__(self) -> str:
        return f"{self.blocks} blocks of {self.tokens} tokens"


CASES = (Case(8, 32), Case(128, 32), Case(32, 128), Case(256, 32))


@dataclass(frozen=True)
class Setting:
    """One row: variables for UCX, and NIXL's threads (vLLM asks for 4 unless told otherwise)."""

    environ: tuple[tuple[str, str], ...] = ()
    threads: int = 4

    def __str__(self) -> str:
        names = " ".join(f"{name}={value}" for name, value in self.environ) or "UCX's defaults"
        return f"{names}, {self.threads} thread{'' if self.threads == 1 else 's'}"


def tls(names: str, threads: int) -> Setting:
    return Setting((("UCX_TLS", names),), threads)


SETTINGS = (
    Setting(threads=4),
    Setting(threads=1),
    Setting(threads=0),
    tls(CPU_TLS, CPU_THREADS),
    tls("cma,tcp,self", 1),
    tls("posix,tcp,self", 1),
    tls("sysv,tcp,self", 1),
    tls("tcp,self", 1),
)


# the two sides


def blocks_of(case: Case, seed: int) -> np.ndarray:
    """The numbers of a case's blocks, in no order."""
    return np.random.default_rng(seed).permutation(case.blocks)


def cache(case: Case) -> np.ndarray:
    """The KV cache: layers x blocks x bytes of a block."""
    return np.empty((LAYERS, case.blocks, case.block_bytes), np.uint8)


def regions(memory: np.ndarray) -> list[tuple[int, int, int, str]]:
    return [(layer.ctypes.data, layer.nbytes, 0, "") for layer in memory]


def descriptors(memory: np.ndarray) -> np.ndarray:
    """(address, bytes, device) of every block, layer by layer."""
    layers, blocks, size = memory.shape
    addresses = memory.ctypes.data + np.arange(layers * blocks, dtype=np.uint64) * np.uint64(size)
    fixed = np.full_like(addresses, size)
    return np.stack([addresses, fixed, np.zeros_like(addresses)], axis=1)


def indexes(case: Case, seed: int) -> np.ndarray:
    """Which of :func:`descriptors` a read takes."""
    return (np.arange(LAYERS)[:, None] * case.blocks + blocks_of(case, seed)).ravel()


def agent(name: str, threads: int) -> Any:
    """A NIXL agent as an engine makes one, the nap of its progress thread included."""
    api = importlib.import_module("nixl._api")
    return napping_agent(api, DEFAULT_NIXL_NAP_US)(name, api.nixl_agent_config(num_threads=threads))


def serve(pipe: Connection, threads: int) -> None:
    """The prefill side: holds memory, for one case after the other."""
    me = agent("prefill", threads)
    while (case := pipe.recv()) is not None:
        memory = cache(case)
        memory[:] = np.arange(memory.shape[1], dtype=np.uint8)[None, :, None]
        memory[:, :, 0] = np.arange(LAYERS, dtype=np.uint8)[:, None]
        registered = me.register_memory(me.get_reg_descs(regions(memory), "DRAM"))
        pipe.send((me.get_agent_metadata(), descriptors(memory)))
        pipe.recv()
        me.deregister_memory(registered)
        pipe.send(None)


def read(pipe: Connection, out: Connection, setting: Setting, reads: int) -> None:
    """The decode side: seconds of each read, by case; the first one, which connects, is not counted."""
    me = agent("decode", setting.threads)
    for case in CASES:
        memory = cache(case)
        memory[:] = 255
        registered = me.register_memory(me.get_reg_descs(regions(memory), "DRAM"))
        pipe.send(case)
        metadata, remote = pipe.recv()
        peer = me.add_remote_agent(metadata)
        local_list = me.prep_xfer_dlist("NIXL_INIT_AGENT", me.get_xfer_descs(descriptors(memory), "DRAM"))
        remote_list = me.prep_xfer_dlist(peer, me.get_xfer_descs(remote, "DRAM"))
        took = []
        for number in range(reads + 1):
            mine, theirs = indexes(case, 2 * number), indexes(case, 2 * number + 1)
            began = time.perf_counter()
            handle = me.make_prepped_xfer("READ", local_list, mine, remote_list, theirs, notif_msg=b"read")
            me.transfer(handle)
            while (state := me.check_xfer_state(handle)) == "PROC":
                time.sleep(0.0001)
            took.append(time.perf_counter() - began)
            assert state == "DONE", state
            me.release_xfer_handle(handle)
            flat = memory.reshape(-1, case.block_bytes)
            blocks, layers = theirs % case.blocks, theirs // case.blocks
            assert (flat[mine, 0] == layers.astype(np.uint8)).all()
            assert (flat[mine, 1] == blocks.astype(np.uint8)).all()
            assert (flat[mine, -1] == blocks.astype(np.uint8)).all()
        out.send((case, took[1:]))
        for made in (local_list, remote_list):
            me.release_dlist_handle(made)
        me.remove_remote_agent(peer)
        me.deregister_memory(registered)
        pipe.send("next")
        pipe.recv()
    pipe.send(None)
    out.send(None)


# what runs them


def measure(setting: Setting, reads: int) -> dict[Case, list[float]]:
    """Seconds of each read of one pair of processes, by case.

    Raises:
        RuntimeError: the pair did not get through; what it got is lost.
    """
    context = multiprocessing.get_context("spawn")
    os.environ.update(setting.environ)
    try:
        left, right = context.Pipe()
        results, out = context.Pipe(duplex=False)
        pair = [
            context.Process(target=serve, args=(left, setting.threads), daemon=True),
            context.Process(target=read, args=(right, out, setting, reads), daemon=True),
        ]
        for process in pair:
            process.start()
        out.close()
    finally:
        for name, _ in setting.environ:
            del os.environ[name]
    found: dict[Case, list[float]] = {}
    try:
        while results.poll(LIMIT_SECONDS):
            if (message := results.recv()) is None:
                return found
            found[message[0]] = message[1]
        raise RuntimeError(f"{setting}: nothing for {LIMIT_SECONDS} s")
    except EOFError as error:
        raise RuntimeError(f"{setting}: the reader died") from error
    finally:
        for process in pair:
            process.terminate()
            process.join()


def memcpy(reads: int) -> dict[Case, list[float]]:
    """The yardstick: seconds of one thread that copies the same blocks."""
    found = {}
    for case in CASES:
        source, target = cache(case), cache(case)
        source[:], target[:] = 1, 2
        sources, targets = descriptors(source)[:, 0], descriptors(target)[:, 0]
        took = []
        for number in range(reads + 1):
            mine = targets[indexes(case, 2 * number)].tolist()
            theirs = sources[indexes(case, 2 * number + 1)].tolist()
            move, size = ctypes.memmove, case.block_bytes
            began = time.perf_counter()
            for to, origin in zip(mine, theirs, strict=True):
                move(to, origin, size)
            took.append(time.perf_counter() - began)
        found[case] = took[1:]
    return found


def table(seconds: Mapping[str, Mapping[Case, list[float]]]) -> str:
    """GB/s (10^9 bytes) by setting and case, and the share of memcpy's."""
    heads = [f"{case}, {case.size / 1e6:.0f} MB" for case in CASES]
    lines = [f"| GB/s (% of memcpy) | {' | '.join(heads)} |", "| --- " * (len(CASES) + 1) + "|"]
    for name, cases in seconds.items():
        cells = []
        for case in CASES:
            if not cases.get(case):
                cells.append("failed")
                continue
            rate = case.size / statistics.median(cases[case]) / 1e9
            best = case.size / statistics.median(seconds[MEMCPY][case]) / 1e9
            cells.append(f"{rate:.2f}" if name == MEMCPY else f"{rate:.2f} ({rate / best:.0%})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(text: str, command: str) -> None:
    """The table into the docs, with the commit that was measured."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=PAGE.parent, capture_output=True, text=True, check=True
    )
    head, found, rest = PAGE.read_text().partition(FROM)
    if not found:
        raise SystemExit(f"{PAGE} has no line {FROM}")
    _, _, tail = rest.partition(TO)
    PAGE.write_text(f"{head}{FROM}\n`{command}` at commit {commit.stdout.strip()}:\n\n{text}\n{TO}{tail}")


def main() -> int:
    parser = argparse.ArgumentParser(description="KV blocks between two processes of this host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", type=int, default=5, help="a case and round")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    seconds: dict[str, dict[Case, list[float]]] = {}
    for number in range(args.rounds):
        for name, setting in ((MEMCPY, None), *((str(each), each) for each in SETTINGS)):
            try:
                found = memcpy(args.reads) if setting is None else measure(setting, args.reads)
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                found = {}
            rates = (f"{case.size / statistics.median(took) / 1e9:.2f}" for case, took in found.items())
            print(f"{name}: {' '.join(rates)} GB/s", flush=True)
            for case in CASES:
                seconds.setdefault(name, {}).setdefault(case, []).extend(found.get(case, []))
        print(f"round {number + 1} of {args.rounds} done", flush=True)
    print("\n" + table(seconds))
    if args.write:
        write(table(seconds), f"python bench/transports.py --rounds {args.rounds} --reads {args.reads}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
