"""`baton doctor`: what is wrong with a cluster or with this host, in plain words, and how to mend it."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from baton.cli.cluster_flags import add_cluster_flags, split
from baton.cli.parser import Parser, seconds
from baton.cli.planning import find_model, hosts_of, shared, told
from baton.cluster import THIS_HOST, Cluster
from baton.launch import (
    Command,
    Examination,
    Finding,
    LaunchError,
    Verdict,
    addresses_here,
    cluster_commands,
    dumps,
    examine,
    exit_code,
    installed_engine,
    node_at,
)
from baton.models import ModelError

_STYLES = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.BAD: "red", Verdict.SKIPPED: "dim"}


def run(words: Sequence[str]) -> int:
    words, engine_args = split(words)
    args = _parser().parse_all(words)
    with told():
        cluster, node = shared(args, engine_args)
        node = here(cluster, args.on or node)
        commands, local = _commands(cluster)
    examination = Examination(
        cluster,
        node,
        installed_engine(),
        commands,
        local_model=local,
        hand_offs=args.hand_off,
        hand_off_seconds=args.hand_off_timeout,
        key=args.engine_api_key or os.environ.get("BATON_ENGINE_API_KEY"),
    )
    findings = asyncio.run(examine(examination))
    if args.json:
        print(dumps({"findings": [vars(each) for each in findings], "bad": exit_code(findings) == 1}))
    else:
        show(findings, Console(highlight=False, soft_wrap=True))
    return exit_code(findings)


def here(cluster: Cluster, said: str | None) -> str | None:
    """Which of the cluster's hosts this is: the one that was named, else the only one, else the one with an address of
    this host's; None for none of them.

    Raises:
        LaunchError: the cluster has no host of that name.
    """
    nodes = hosts_of(cluster)
    if said is not None:
        if said not in nodes:
            raise LaunchError(f"--on {said}: the cluster has no such host; there are {', '.join(nodes)}")
        return said
    if len(nodes) == 1:
        return nodes[0]
    return THIS_HOST if THIS_HOST in nodes else node_at(cluster, addresses_here())


def _commands(cluster: Cluster) -> tuple[Mapping[str, Command], bool]:
    """The commands of the engines, and whether the model is on this disk; none when there is no such model here."""
    try:
        model = find_model(cluster)
    except ModelError:
        return {}, False
    return cluster_commands(cluster, model, installed_engine()), model.local


def show(findings: Sequence[Finding], console: Console) -> None:
    """One line a finding, its remedy below it, and the sum at the end."""
    for each in findings:
        line = Text(f"{each.verdict:8}", style=_STYLES[each.verdict])
        console.print(line.append(f"{each.check}: {each.subject}: {each.what}", style="default"))
        if each.remedy:
            console.print(Text(f"{'':8}-> {each.remedy}"))
    count = sum(each.verdict is Verdict.BAD for each in findings)
    console.print("nothing is wrong" if not count else f"{count} thing{'s' if count > 1 else ''} to mend")


def _parser() -> Parser:
    parser = Parser(
        prog="baton doctor",
        usage="baton doctor [MODEL] [options] [-- vllm serve's flags for every engine]",
        description=(
            "Look at this host and at the cluster that flags or file describe, running or not; exit code 1 when "
            "something is wrong."
        ),
        epilog=(
            "examples:\n"
            "  baton doctor\n"
            "  baton doctor -f examples/2p3d.yaml\n"
            "  baton doctor -f examples/neuron-1p1d-hosts.yaml --host p0 --json"
        ),
    )
    add_cluster_flags(parser)
    parser.add_argument(
        "--on",
        metavar="HOST",
        help="which host of the file this is, as --host says too (default: the one that has our address)",
    )
    parser.add_argument(
        "--hand-off",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether every pair of engines hands over once (default: --hand-off)",
    )
    parser.add_argument(
        "--hand-off-timeout", type=seconds, default=60.0, metavar="S", help="seconds for one pair (default: 60)"
    )
    parser.add_argument("--engine-api-key", metavar="KEY", help="for engines (default: $BATON_ENGINE_API_KEY)")
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser
