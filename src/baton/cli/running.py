"""What the commands on a running cluster share: which one is meant, and how a change is shown."""

from __future__ import annotations

import asyncio

from baton.cli.parser import Failure, Parser
from baton.launch import (
    DEFAULT_NAME,
    ClusterRecord,
    ControlFailed,
    LaunchError,
    ask_change,
    known_names,
    load,
)


def add_name(parser: Parser) -> None:
    parser.add_argument(
        "--name", default=DEFAULT_NAME, help=f"the cluster's, as given to `baton up` (default: {DEFAULT_NAME})"
    )


def the_cluster(name: str) -> ClusterRecord:
    """The cluster of that name.

    Raises:
        Failure: there is none, or its file is no good.
    """
    try:
        record = load(name)
    except LaunchError as error:
        raise Failure(str(error)) from error
    if record is None:
        others = known_names()
        hint = f"there is {', '.join(others)}: name it with --name" if others else "start one with `baton up`"
        raise Failure(f"no cluster {name!r} is running: {hint}")
    return record


def change(name: str, what: str, body: object) -> int:
    """Have a cluster's supervisor change something, and print what it says.

    Raises:
        Failure: nobody is there to do it, or it went wrong.
    """
    record = the_cluster(name)
    if not record.supervised:
        raise Failure(
            f"the supervisor of {name!r} is gone (its engines may still serve): `baton up`, in the words that started "
            "it, takes them over; `baton down` ends them"
        )
    try:
        asyncio.run(ask_change(record, what, body, lambda line: print(line, flush=True)))
    except ControlFailed as error:
        raise Failure(str(error)) from error
    return 0
