"""`baton drain`: an instance finishes what it does and gets nothing new."""

from __future__ import annotations

from collections.abc import Sequence

from baton.cli.parser import Parser
from baton.cli.running import add_name, change


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton drain",
        description="Send instances nothing new, and wait until what is under way there is done: requests, and KV "
        "caches that nobody has fetched yet. `baton restart ID` brings one back.",
        epilog="example: baton drain D1",
    )
    parser.add_argument("ids", nargs="+", metavar="ID", help="such as P0 or D1")
    add_name(parser)
    args = parser.parse_all(words)
    return change(args.name, "drain", args.ids)
