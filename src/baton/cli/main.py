"""The command `baton`: finds the subcommand and turns errors into one line and an exit code.

Exit codes: 0 done, 1 it failed, 2 the words are off, 130 interrupted.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from baton import __version__
from baton.cli.parser import Failure, Parser

_COMMANDS = {
    "up": "start engines and proxy on this host, and stop them together",
    "init": "write a commented cluster file",
    "plan": "what up would start: ports, devices, commands",
    "doctor": "what is wrong, and how to mend it",
    "engine": "one vLLM server in a role",
    "proxy": "the front door: takes OpenAI requests and runs both phases",
    "status": "what a running cluster is doing",
    "logs": "what one of its processes has written",
    "scale": "more or fewer servers of a role, while it serves",
    "drain": "have an instance finish and get nothing new",
    "restart": "start instances anew, one after the other",
    "down": "end everything that `baton up` started",
    "sim": "fake engines that behave and break as real ones do",
    "model": "the embedded model: list, path",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        name, rest = _command(words)
        # Only the named command is imported: `baton proxy` must not pay for the launcher.
        return int(importlib.import_module(f"baton.cli.{name}").run(rest))
    except Failure as failure:
        print(f"baton: {failure}", file=sys.stderr)
        for line in failure.details:
            print(f"  {line}", file=sys.stderr)
        return failure.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as in `baton model list | head -1`.
        sys.stderr.close()
        return 1


def _command(words: list[str]) -> tuple[str, list[str]]:
    parser = Parser(
        prog="baton",
        description="Disaggregated LLM inference on stock vLLM: prefill and decode on separate servers.",
        epilog="example: baton up --prompt 'Count the number 1, 2, 3'",
    )
    parser.add_argument("--version", action="version", version=f"baton {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, help_text in _COMMANDS.items():
        commands.add_parser(name, help=help_text, add_help=False)
    if not words:
        parser.print_help()
        raise SystemExit(2)
    if words[0] in _COMMANDS:
        return words[0], words[1:]
    parser.parse_args(words[:1])
    raise AssertionError("unreachable: argparse ends on any other word")
