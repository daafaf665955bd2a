"""`baton down`: ends a cluster, also one whose supervisor has crashed, and nothing that is not its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from baton.cli.parser import Failure, Parser
from baton.cli.running import add_name, the_cluster
from baton.launch import LaunchError, known_names, take_down


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton down",
        description="End everything that `baton up` started, also after it crashed, and nothing else.",
        epilog="example: baton down",
    )
    add_name(parser)
    parser.add_argument("--all", action="store_true", help="every cluster of yours on this host")
    args = parser.parse_all(words)
    names = known_names() if args.all else [args.name]
    try:
        for name in names:
            asyncio.run(take_down(the_cluster(name), lambda line: print(line, flush=True)))
            print(f"{name}: everything is stopped")
    except LaunchError as error:
        raise Failure(str(error)) from error
    if not names:
        print("nothing is running")
    return 0
