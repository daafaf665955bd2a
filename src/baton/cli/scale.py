"""`baton scale`: more or fewer servers of a role, while the cluster serves."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cli.parser import Failure, Parser, servers
from baton.cli.running import add_name, change
from baton.cluster import Role


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton scale",
        description="Start or stop servers until there are so many of a role. Those that go are drained first.",
        epilog="example: baton scale --decode 4",
    )
    for role in Role:
        parser.add_argument(f"--{role}", type=servers, metavar="N", help=f"{role} servers that there are to be")
    add_name(parser)
    args = parser.parse_all(words)
    wanted = {str(role): number for role in Role if (number := getattr(args, role)) is not None}
    if not wanted:
        raise Failure("say how many: --prefill N, --decode N, or both (see `baton scale --help`)", 2)
    return change(args.name, "scale", wanted)
