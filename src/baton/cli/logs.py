"""`baton logs`: what a process of the cluster has written."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from baton.cli.parser import Failure, Parser, count
from baton.cli.running import add_name, the_cluster
from baton.launch import here, unknown_here

LOOK_SECONDS = 0.2


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton logs",
        description="Print the end of an instance's log.",
        epilog="examples:\n  baton logs D0\n  baton logs -f proxy",
    )
    parser.add_argument("id", metavar="ID", help="such as P0, D1 or proxy")
    parser.add_argument("-n", "--lines", type=count, default=50, metavar="N", help="the last so many (default: 50)")
    parser.add_argument("-f", "--follow", action="store_true", help="and what comes, until Ctrl-C")
    add_name(parser)
    args = parser.parse_all(words)
    record = the_cluster(args.name)
    if args.id not in here(record.cluster, record.node):
        raise Failure(unknown_here(record.cluster, record.node, args.id), 2)
    log = record.logs / f"{args.id}.log"
    if not log.exists():
        raise Failure(f"there is no log yet at {log}")
    with log.open(errors="replace") as file:
        sys.stdout.writelines(deque(file, args.lines))
        at = file.tell()
    while args.follow:
        sys.stdout.flush()
        time.sleep(LOOK_SECONDS)
        text, at = fresh(log, at)
        sys.stdout.write(text)
    return 0


def fresh(log: Path, at: int) -> tuple[str, int]:
    """What a log has got since position *at*, and its end now; from its beginning when it was cut meanwhile."""
    with log.open(errors="replace") as file:
        if log.stat().st_size < at:
            at = 0
        file.seek(at)
        return file.read(), file.tell()
