#!/usr/bin/env python3
"""Component data parallelism against plain data parallelism: the same two replicas on the same cores, one run.

Each kind is a decode server that computes prompts too. All are up at once and take turns, so that a machine that
becomes slower does so for all: milliseconds a token by clients at once, and the bytes of weights that a rank said it
holds. The model is one of four small layers made on the spot, or any that is given. Measure on a machine that does
nothing else.

usage: python bench/component_dp.py [--model MODEL] [--shared attention,mlp] [--rounds 5] [--tokens 32]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from engine import Engine, say, tiny

COMPONENTS = ("attention", "embedding", "mlp", "lm_head")
CLIENTS = (1, 2, 8)
REPLICAS = 2
FLAGS = ("--max-num-seqs", "8", "--max-model-len", "1024")


def weight_bytes(log: str) -> str:
    """Of one rank, as the engine said."""
    found = re.search(r"Bytes of weights on rank 0: (.*)", log)
    return f"{sum(map(int, re.findall(r'[0-9]+', found[1]))):,}" if found else ""


def engine_of(model: str, shared: Sequence[str], folder: Path, port: int) -> Engine:
    """A decode server of two replicas that share *shared*."""
    own = json.dumps({"baton_config": {f"{component}_dp_size": REPLICAS for component in shared}})
    flags = ("--data-parallel-size", str(REPLICAS), "--additional-config", own, *FLAGS)
    return Engine(model, "+".join(shared) or "nothing", folder, port, flags)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or name; one of four small layers unless given")
    parser.add_argument("--shared", default=",".join(COMPONENTS), help="components of the second kind, with , between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--port", type=int, default=18400)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = args.model or tiny(folder)
        kinds: Sequence[Sequence[str]] = ((), args.shared.split(","))
        engines = [
            stack.enter_context(engine_of(model, shared, folder, args.port + 10 * place))
            for place, shared in enumerate(kinds)
        ]
        made: dict[tuple[str, int], list[float]] = {}
        for turn in range(1 + args.rounds):
            for clients in CLIENTS:
                for engine in engines if turn % 2 else engines[::-1]:
                    spent = engine.decode(clients, args.tokens, REPLICAS)
                    if turn:  # the first is for what is made at first use
                        made.setdefault((engine.kind, clients), []).append(spent)
            say(f"round {turn} of {args.rounds}")
        print(f"| shared | bytes of weights a rank | {' | '.join(f'{n} at once, ms a token' for n in CLIENTS)} |")
        print("| --- " * (len(CLIENTS) + 2) + "|")
        for engine in engines:
            cells = [f"{statistics.median(made[engine.kind, clients]):.1f}" for clients in CLIENTS]
            print(f"| {engine.kind} | {weight_bytes(engine.said())} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
