"""`baton restart`: instances start anew, one after the other, each drained before."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cli.parser import Failure, Parser
from baton.cli.running import add_name, change, the_cluster


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton restart",
        description="Start instances anew, one after the other; each is drained before.",
        epilog="examples:\n  baton restart D1\n  baton restart --all",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="such as P0, D1 or proxy")
    parser.add_argument("--all", action="store_true", help="every prefill and decode server of this host")
    add_name(parser)
    args = parser.parse_all(words)
    if bool(args.ids) == args.all:
        raise Failure("name instances, or give --all (see `baton restart --help`)", 2)
    ids = args.ids
    if args.all:
        record = the_cluster(args.name)
        ids = [each.id for each in record.cluster.on(record.node)]
    return change(args.name, "restart", ids)
