#!/usr/bin/env python3
"""Static shapes against stock vLLM, eager and compiled: the same engine flags and the same work, one run.

First every kind is started alone: seconds to healthy, and graphs. `cold` starts with an empty store of graphs, `warm`
with the one that `cold` filled; `decode only` is what a decode server makes. Then those that differ in speed run beside
each other and take turns, request by request, so that a machine that becomes slower does so for all: milliseconds a
token of decode by clients at once, milliseconds a prompt. Measure on a machine that does nothing else.

What is measured is kept in --state as it comes: started again, a run goes on where it was stopped, with --fresh from
the beginning. --quick takes a model of four small layers made on the spot.

usage: python bench/static_shapes.py [--quick] [--rounds 5] [--tokens 32] [--threads N] [--write]
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine import Engine, say, tiny

MODEL = "smollm2-135m-instruct"
START_SECONDS = 1800.0
BOTH = json.dumps({"kv_role": "kv_both"})
STATIC = ("--static-shapes", "--kv-transfer-config", BOTH)
KINDS: Mapping[str, Sequence[str]] = {
    "eager": ("--kv-transfer-config", BOTH),
    "compiled": ("--kv-transfer-config", BOTH, "--compilation-config", "{}"),
    "static, padded only": (*STATIC, "--enforce-eager"),
    "static, cold": STATIC,
    "static, warm": STATIC,
    "eager, decode only": (),
    "static, warm, decode only": ("--static-shapes",),
}
COLD = "static, cold"
SPEED = ("eager", "compiled", "static, padded only", "static, warm")
"""Those whose speed is measured."""

PROMPTS = (20, 150, 500)
"""Tokens of the prompts whose prefill is measured: none of them fills a bucket."""

CLIENTS = (1, 5, 8)
"""How many decode at once: 5 do not fill a bucket."""

SEQS, BATCHED = max(CLIENTS), 512
FLAGS = ("--max-num-seqs", str(SEQS), "--max-num-batched-tokens", str(BATCHED), "--max-model-len", "1024")
ROOT = Path(__file__).parent.parent
PERFORMANCE = ROOT / "docs" / "performance.md"
MARKS = "<!-- from bench/static_shapes.py -->", "<!-- to here: static shapes -->"


def last_graph(log: str) -> str:
    found = re.findall(r"static shapes: (graph \d+ of \d+, [a-z]+ bucket \d+)", log)
    return found[-1] if found else "no graph yet"


def graphs(log: str) -> str:
    found = re.search(r"ready with (\d+) graphs compiled and (\d+) loaded", log)
    return f"{found[1]} compiled, {found[2]} loaded" if found else ""


def engine_of(model: str, kind: str, folder: Path, port: int, threads: int) -> Engine:
    environ = {"BATON_GRAPH_CACHE": str(folder / "graphs"), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # vLLM's own compiled code is cold at first as well.
    environ["VLLM_CACHE_ROOT"] = str(folder / "vllm")
    if threads:
        environ["OMP_NUM_THREADS"] = str(threads)
    flags = (*FLAGS, *KINDS[kind])
    return Engine(model, kind, folder, port, flags, environ=environ, start_seconds=START_SECONDS, progress=last_graph)


class State:
    """What has been measured, in a file."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        self.found: dict[str, Any] = {"settings": dict(settings), "starts": {}, "rounds": []}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] != self.found["settings"]:
                raise SystemExit(f"{path} is of another run ({kept['settings']}): give --fresh, or another --state")
            self.found = kept

    def keep(self) -> None:
        self._path.write_text(json.dumps(self.found, indent=1))


def measure_starts(state: State, make: Any, kinds: Sequence[str], folder: Path) -> None:
    """Start each kind alone, but for those that have been."""
    for kind in kinds:
        if kind in state.found["starts"]:
            continue
        if kind == COLD:
            shutil.rmtree(folder / "graphs", ignore_errors=True)
        with make(kind, 0) as engine:
            engine.seconds_of(20, 4, 0)
            state.found["starts"][kind] = {"seconds": engine.seconds, "graphs": graphs(engine.said())}
        state.keep()


def measure_speed(state: State, make: Any, kinds: Sequence[str], rounds: int, tokens: int) -> None:
    """Rounds over all kinds, which are up at once and take turns."""
    if len(state.found["rounds"]) >= rounds or not kinds:
        return
    with ExitStack() as stack:
        engines = [stack.enter_context(make(kind, place)) for place, kind in enumerate(kinds)]
        for engine in engines:  # what is made at first use
            engine.decode(SEQS, 2)
            for length in PROMPTS:
                engine.seconds_of(length, 1, 0)
        while (turn := len(state.found["rounds"])) < rounds:
            made: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
            in_turn = engines if turn % 2 == 0 else engines[::-1]
            for clients in CLIENTS:
                for engine in in_turn:
                    made[engine.kind][f"decode, {clients} at once, ms a token"] = engine.decode(clients, tokens)
            for length in PROMPTS:
                for engine in in_turn:
                    made[engine.kind][f"prompt of {length}, ms"] = 1000 * engine.seconds_of(length, 1, turn + 1)
            state.found["rounds"].append(made)
            state.keep()
            say(
                f"round {turn + 1} of {rounds}: "
                + json.dumps({k: [round(x, 1) for x in v.values()] for k, v in made.items()})
            )


def table(found: Mapping[str, Any]) -> str:
    """Medians over the rounds."""
    heads = [f"decode, {clients} at once, ms a token" for clients in CLIENTS]
    heads += [f"prompt of {length}, ms" for length in PROMPTS]
    lines = [f"| | start, s | graphs | {' | '.join(heads)} |", "| --- " * (len(heads) + 3) + "|"]
    for kind, start in found["starts"].items():
        rounds = [turn[kind] for turn in found["rounds"] if kind in turn]
        cells = [f"{statistics.median(turn[head] for turn in rounds):.1f}" if rounds else "" for head in heads]
        lines.append(f"| {kind} | {start['seconds']:.1f} | {start['graphs']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(words: Sequence[str], found: Mapping[str, Any]) -> None:
    """The table and where it comes from, into the page."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    command = " ".join(
        ["python bench/static_shapes.py", *(word for word in words if word not in ("--write", "--fresh"))]
    )
    text = PERFORMANCE.read_text()
    first, last = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PERFORMANCE.write_text(f"{text[:first]}\n`{command}` at commit {commit}:\n\n{table(found)}\n{text[last:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model instead of the embedded one")
    parser.add_argument("--kinds", default=";".join(KINDS), help="some of them, with ; between")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=0, help="of each engine; all cores unless given")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--state", type=Path, help="folder for what has been measured, graphs and logs")
    parser.add_argument("--fresh", action="store_true", help="forget what has been measured")
    parser.add_argument("--write", action="store_true", help=f"the table into {PERFORMANCE.name}")
    args = parser.parse_args()
    kinds = args.kinds.split(";")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        parser.error(f"--kinds: {', '.join(unknown)} is unknown; known: {'; '.join(KINDS)}")
    folder = args.state or Path(tempfile.gettempdir()) / f"baton-bench-static-{'tiny' if args.quick else 'embedded'}"
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    state = State(folder / "measured.json", {"quick": args.quick, "tokens": args.tokens, "threads": args.threads})
    model = tiny(folder) if args.quick else MODEL

    def make(kind: str, place: int) -> Engine:
        return engine_of(model, kind, folder, args.port + 10 * place, args.threads)

    measure_starts(state, make, kinds, folder)
    measure_speed(state, make, [kind for kind in kinds if kind in SPEED], args.rounds, args.tokens)
    print(table(state.found))
    if args.write:
        write(sys.argv[1:], state.found)


if __name__ == "__main__":
    main()
