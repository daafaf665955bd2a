"""Every topology on real engines, one after the other: is the text right, what does it cost, do the blocks come back.

For each: a cluster of a tiny model started by Baton's own commands; its proxy is asked 20 prompts around block
boundaries, one after the other and 8 at once, and every pair of a prefill and a decode server is asked some by itself;
the answers must be those of one server that does both phases. Then short answers are streamed, one at a time, for the
time to the first token and the bytes a hand-off, and the KV caches must be as empty as at the start. What fails is a
row that says so.

    python -m bench.topologies [--only NAME ...] [--write] [--logs DIR]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.e2e import libfabric, test_eagle, test_eagle_experts, tiny
from tests.e2e.engines import Server, events, eventually
from tests.e2e.topology import (
    MODEL,
    TOKENS_OUT,
    Cluster,
    Engine,
    answer,
    answers,
    cluster,
    pair_proxy,
    prompts,
    reference,
    used_kv,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "topologies.md"
FROM, TO = "<!-- from bench/topologies.py -->", "<!-- to here: topologies -->"
MEASURED = 150
"""Tokens of the prompts that are measured: five blocks, the last of them not full."""
HAND_OFFS = 15
CHATS, TURNS = 3, 5
SETTLED_SECONDS = 2.0
KEPT_SECONDS = 60
"""How long decode servers keep a turn here, so that the blocks of the last one are seen to come back."""

EXPERTS = ("--enable-expert-parallel",)
Expected = Mapping[str, str]


@dataclass(frozen=True)
class Topology:
    """One row.

    Attributes:
        command: as a user types it, with MODEL and DRAFT for folders.
        test: that proves it, within tests/.
        model: makes the model in an empty folder, or says where one is.
        chats: whether conversations are what is measured.
        environ: variables of the engines; may find that something is missing.
    """

    name: str
    command: str
    test: str
    model: Callable[[Path], Path]
    prefill: Sequence[Engine] = (Engine(),)
    decode: Sequence[Engine] = (Engine(),)
    proxy: Sequence[str] = ()
    asked: Callable[[], dict[str, list[int]]] = prompts
    chats: bool = False
    environ: Callable[[], Mapping[str, str]] = dict


@dataclass(frozen=True)
class Row:
    """What was found of one topology; a failure has its reason in *text* and no numbers."""

    topology: Topology
    text: str
    start_seconds: float = 0.0
    first_token_seconds: float = 0.0
    bytes_a_hand_off: float = 0.0
    blocks_back: bool = False

    @property
    def good(self) -> bool:
        return self.text == "right" and self.blocks_back

    def cells(self) -> tuple[str, ...]:
        numbers: tuple[str, ...] = ("", "", "", "")
        if self.start_seconds:
            numbers = (
                f"{self.start_seconds:.0f} s",
                f"{self.first_token_seconds * 1e3:.0f} ms",
                f"{self.bytes_a_hand_off / 1e3:,.0f} kB",
                "yes" if self.blocks_back else "NO",
            )
        text = self.text.replace("|", "/")
        return (self.topology.name, f"`{self.topology.command}`", f"`{self.topology.test}`", text, *numbers)


@dataclass(frozen=True)
class Measured:
    """Seconds to the first token (p50), bytes a hand-off, and what was not as it must be."""

    seconds: float
    bytes_moved: float
    wrong: list[str]


def ranks(*, tensor: int = 1, data: int = 1, flags: Sequence[str] = ()) -> Engine:
    words: tuple[str, ...] = tuple(flags)
    if tensor > 1:
        words += ("--tensor-parallel-size", str(tensor))
    if data > 1:
        words += ("--data-parallel-size", str(data))
    return Engine(words, side_channels=data)


def folder_of(models: Path, _: Path) -> Path:
    return models / "target"


def topologies() -> list[Topology]:
    """All of them, plain ones first."""
    keep = f'{{"kv_connector_extra_config": {{"decoder_kv_blocks_ttl": {KEPT_SECONDS}}}}}'
    keeps = Engine(("--bidirectional-kv", "--remote-pull-threshold", "1", "--kv-transfer-config", keep))
    write = Engine(("--transfer-mode", "write"))
    eagle = Engine(test_eagle.speculative(test_eagle.MODELS))
    spread = test_eagle.speculative(test_eagle_experts.MODELS)
    drafting = """--speculative-config '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}'"""
    hybrid = "e2e/test_hybrid_tp.py::test_the_text_is_one_servers_and_every_rank_frees_its_blocks"
    one_head = partial(tiny.llama, kv_heads=1)

    def tensor(prefill: int, decode: int) -> str:
        given = ((role, size) for role, size in (("prefill", prefill), ("decode", decode)) if size > 1)
        return "baton up MODEL " + " ".join(f'--{role}-args "--tensor-parallel-size {size}"' for role, size in given)

    return [
        Topology(
            "1P1D, read",
            "baton up MODEL",
            "e2e/test_hand_off.py::test_the_text_is_the_one_servers_uncached",
            tiny.llama,
        ),
        Topology(
            "1P1D, write",
            "baton up MODEL --transfer-mode write",
            "e2e/test_write_mode.py::test_the_text_is_one_servers_through_the_proxy",
            tiny.llama,
            (write,),
            (write,),
        ),
        Topology(
            "1P1D, bidirectional",
            "baton up MODEL --bidirectional-kv",
            "e2e/test_kept_turns.py::test_five_turns_through_the_proxy",
            tiny.llama,
            (keeps,),
            (keeps,),
            ("--turns", "--turn-ttl-seconds", str(KEPT_SECONDS // 2)),
            chats=True,
        ),
        Topology(
            "2P2D",
            "baton up MODEL --prefill 2 --decode 2",
            "e2e/test_fleets.py::test_every_pair_hands_over",
            tiny.llama,
            (Engine(),) * 2,
            (Engine(),) * 2,
        ),
        Topology(
            "2P3D",
            "baton up MODEL --prefill 2 --decode 3",
            "bench/topologies.py --only 2P3D",
            tiny.llama,
            (Engine(),) * 2,
            (Engine(),) * 3,
        ),
        *(
            Topology(
                f"TP {prefill} to TP {decode}{more}",
                tensor(prefill, decode),
                hybrid,
                model,
                (ranks(tensor=prefill),),
                (ranks(tensor=decode),),
            )
            for prefill, decode, more, model in (
                (1, 2, "", tiny.llama),
                (2, 1, "", tiny.llama),
                (2, 2, "", tiny.llama),
                (1, 2, ", one KV head", one_head),
                (2, 1, ", one KV head", one_head),
            )
        ),
        Topology(
            "DP2 + EP decode",
            'baton up MODEL --decode-args "--data-parallel-size 2 --enable-expert-parallel"',
            "e2e/test_experts.py::test_the_text_is_one_servers_whatever_the_ranks_batches",
            tiny.qwen3_moe,
            decode=(ranks(data=2, flags=EXPERTS),),
        ),
        Topology(
            "TP2 x EP decode",
            'baton up MODEL --decode-args "--tensor-parallel-size 2 --enable-expert-parallel"',
            "e2e/test_experts.py::test_experts_may_be_spread_over_tensor_parallel_ranks",
            tiny.qwen3_moe,
            decode=(ranks(tensor=2, flags=EXPERTS),),
        ),
        Topology(
            "TP2 x DP2 x EP decode",
            'baton up MODEL --decode-args "--tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel"',
            "e2e/test_experts.py::test_experts_may_be_spread_over_both_kinds_of_ranks",
            tiny.qwen3_moe,
            decode=(ranks(tensor=2, data=2, flags=EXPERTS),),
        ),
        Topology(
            "Eagle3",
            f"baton up MODEL -- {drafting}",
            "e2e/test_eagle.py::test_the_text_is_one_servers",
            partial(folder_of, test_eagle.MODELS),
            (eagle,),
            (eagle,),
            asked=test_eagle.prompts,
        ),
        Topology(
            "Eagle3, DP2 + EP decode",
            f'baton up MODEL --decode-args "--data-parallel-size 2 --enable-expert-parallel" -- {drafting}',
            "e2e/test_eagle_experts.py::test_the_text_is_one_servers_with_experts_spread_over_ranks",
            partial(folder_of, test_eagle_experts.MODELS),
            (Engine(spread),),
            (ranks(data=2, flags=(*spread, *EXPERTS)),),
            asked=test_eagle.prompts,
        ),
        Topology(
            "LIBFABRIC",
            "baton up MODEL --transfer-backend LIBFABRIC",
            "e2e/test_libfabric.py::test_the_text_is_one_servers_and_the_blocks_come_back",
            tiny.llama,
            (Engine(("--transfer-backend", "LIBFABRIC")),),
            (Engine(("--transfer-backend", "LIBFABRIC")),),
            environ=libfabric.environ,
        ),
    ]


def measure(topology: Topology, logs: Path, say: Callable[[str], None]) -> Row:
    """The row of one topology, whatever becomes of it."""
    try:
        environ = topology.environ()
    except libfabric.Missing as error:
        return Row(topology, f"not run: {error}")
    sides = [
        [Engine(each.flags, each.side_channels, environ) for each in role]
        for role in (topology.prefill, topology.decode)
    ]
    name = "".join(letter if letter.isalnum() else "-" for letter in topology.name)
    try:
        with tempfile.TemporaryDirectory(prefix="topology-") as folder:
            model = topology.model(Path(folder))
            began = time.monotonic()
            say("starting")
            with cluster(name, model, logs, prefill=sides[0], decode=sides[1], proxy=topology.proxy) as made:
                return look(topology, made, time.monotonic() - began, logs, say)
    except Exception as error:  # it is the row
        lines = str(error).strip().splitlines() or [""]
        return Row(topology, f"FAILED: {type(error).__name__}: {lines[0][:200]}")


def look(topology: Topology, made: Cluster, started: float, logs: Path, say: Callable[[str], None]) -> Row:
    """Ask *made* everything."""
    servers = [*made.prefill, *made.decode]
    say(f"started in {started:.0f} s; one server's answers")
    asked = topology.asked()
    # One rank is the plainest server to compare with, where there is one.
    plain = [
        server
        for server, engine in zip(servers, (*topology.prefill, *topology.decode), strict=True)
        if not any("parallel-size" in flag for flag in engine.flags)
    ]
    expected = reference((plain or servers)[0], asked)
    wrong: list[str] = []
    for at_once in (1, 8):
        say(f"20 prompts, {at_once} at once")
        wrong += differences(f"{at_once} at once", answers(made.proxy.url, asked, at_once), expected)
    wrong += ask_pairs(made, asked, expected, logs, say)
    say("conversations" if topology.chats else "hand-offs, one by one")
    found = measure_turns(made) if topology.chats else measure_hand_offs(made)
    wrong += found.wrong
    say("blocks")
    back = eventually(lambda: used_kv(servers), 0.0, 2 * KEPT_SECONDS) == 0.0
    text = "right" if not wrong else f"WRONG: {len(wrong)}, first {wrong[0]}"
    return Row(topology, text, started, found.seconds, found.bytes_moved, back)


def differences(where: str, got: Mapping[str, str], expected: Expected) -> list[str]:
    return [f"{where}: {name}" for name, text in got.items() if text != expected[name]]


def ask_pairs(
    made: Cluster, asked: Mapping[str, Sequence[int]], expected: Expected, logs: Path, say: Callable[[str], None]
) -> list[str]:
    """What every pair by itself, behind a proxy of its own, answers wrong; nothing to do for a single pair."""
    if len(made.prefill) * len(made.decode) == 1:
        return []
    few, wrong = dict(list(asked.items())[::4]), []
    for (p, prefill), (d, decode) in itertools.product(enumerate(made.prefill), enumerate(made.decode)):
        say(f"P{p} to D{d}")
        with pair_proxy(prefill, decode, logs) as proxy:
            before = moved_bytes([prefill, decode])
            wrong += differences(f"P{p} to D{d}", answers(proxy.url, few), expected)
            if not eventually(lambda: moved_bytes([prefill, decode]) > before, True, 30.0):  # noqa: B023
                wrong.append(f"P{p} to D{d} moved nothing")
    return wrong


def measure_hand_offs(made: Cluster) -> Measured:
    """Prompts of :data:`MEASURED` tokens, one at a time."""
    chance = random.Random(11)
    before = settled_bytes(made)
    asked = [ask(made.proxy, [chance.randrange(10, 90) for _ in range(MEASURED)]) for _ in range(HAND_OFFS)]
    moved = settled_bytes(made) - before
    return Measured(statistics.median(each.seconds for each in asked), moved / HAND_OFFS, [])


def measure_turns(made: Cluster) -> Measured:
    """Conversations: the time is that of later turns, and a hand-off is there and back again."""
    chance = random.Random(21)
    seconds, wrong, before = [], [], settled_bytes(made)
    for number in range(CHATS):
        prompt = [chance.randrange(10, 90) for _ in range(MEASURED)]
        for turn in range(TURNS):
            got = ask(made.proxy, prompt, {"X-Session-ID": f"chat-{number}"})
            if got.text != answer(made.decode[0].url, prompt):
                wrong.append(f"turn {turn} of chat {number}")
            if turn:
                seconds.append(got.seconds)
            prompt = [*prompt, *got.tokens, *(chance.randrange(10, 90) for _ in range(20))]
    used = made.proxy.metric("baton_turns_used_total")
    if used != CHATS * (TURNS - 1):
        wrong.append(f"{used:.0f} of {CHATS * (TURNS - 1)} turns were used")
    return Measured(statistics.median(seconds), (settled_bytes(made) - before) / (CHATS * TURNS), wrong)


@dataclass(frozen=True)
class Streamed:
    """An answer, and the seconds from its request to its first event."""

    seconds: float
    text: str
    tokens: list[int]


def ask(proxy: Server, prompt: Sequence[int], headers: Mapping[str, str] | None = None) -> Streamed:
    """One streamed answer."""
    body = {"model": MODEL, "prompt": list(prompt), "max_tokens": TOKENS_OUT, "temperature": 0, "ignore_eos": True}
    raw = json.dumps({**body, "stream": True, "return_token_ids": True})
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=300)
    with contextlib.closing(connection):
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", raw, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        first = response.readline()
        seconds = time.perf_counter() - began
        rest = response.read()
    if response.status != 200:
        raise RuntimeError(f"the proxy answered {response.status}: {(first + rest)[:200]!r}")
    choices = [event["choices"][0] for event in events(first + rest)]
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    return Streamed(seconds, "".join(choice["text"] for choice in choices), tokens)


def moved_bytes(servers: Sequence[Server]) -> float:
    """Bytes of KV cache that the servers have moved; whoever starts a transfer counts it."""
    return sum(server.metric("vllm:nixl_bytes_transferred_sum") for server in servers)


def settled_bytes(made: Cluster) -> float:
    """The same once nothing is added any more: engines publish counters late."""
    servers = [*made.prefill, *made.decode]
    since, last = time.monotonic(), moved_bytes(servers)
    while time.monotonic() - since < SETTLED_SECONDS:
        time.sleep(0.2)
        if (now := moved_bytes(servers)) != last:
            since, last = time.monotonic(), now
    return last


def table(rows: Sequence[Row]) -> str:
    heads = ("topology", "command", "test", "text", "start", "first token p50", "moved a hand-off", "blocks back")
    lines = [heads, ("---",) * len(heads), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(text: str) -> None:
    """The table into the docs, with the commit that was measured."""
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), cwd=PAGE.parent, capture_output=True, text=True, check=True
    )
    head, found, rest = PAGE.read_text().partition(FROM)
    if not found:
        raise SystemExit(f"{PAGE} has no line {FROM}")
    _, _, tail = rest.partition(TO)
    said = f"`python -m bench.topologies` at commit {commit.stdout.strip()}:"
    PAGE.write_text(f"{head}{FROM}\n{said}\n\n{text}\n{TO}{tail}")


def main() -> int:
    every = topologies()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="parts of names; a whole name means itself alone")
    parser.add_argument("--write", action="store_true", help=f"put the table into docs/{PAGE.name}; not with --only")
    parser.add_argument("--logs", metavar="DIR", help="where logs stay (default: they go)")
    parser.add_argument("--list", action="store_true", help="print the names, and stop")
    args = parser.parse_args()
    wanted = {each.name for name in args.only or [""] for each in named(every, name)}
    chosen = [each for each in every if each.name in wanted]
    if args.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if not chosen:
        parser.error(f"--only {' '.join(args.only)}: names are {'; '.join(each.name for each in every)}")
    if args.write and args.only:
        parser.error("--write wants all topologies in one run: drop --only")
    rows, began = [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="topologies-") as folder:
        logs = Path(args.logs or folder)
        logs.mkdir(parents=True, exist_ok=True)
        for number, topology in enumerate(chosen, 1):

            def say(what: str, where: str = f"[{number}/{len(chosen)}] {topology.name}") -> None:
                print(f"{time.monotonic() - began:5.0f} s {where}: {what}", file=sys.stderr, flush=True)

            rows.append(measure(topology, logs, say))
            say(" | ".join(rows[-1].cells()[3:]))
    print(table(rows))
    if args.write:
        write(table(rows))
    return 0 if all(row.good for row in rows) else 1


def named(every: Sequence[Topology], name: str) -> list[Topology]:
    return [each for each in every if each.name == name] or [each for each in every if name in each.name]


if __name__ == "__main__":
    sys.exit(main())
