"""argparse with one-line errors that name the nearest right word."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from baton.cluster import TransferMode
from baton.numbers import MOST_SERVERS, decimal


class Failure(Exception):
    """A command that ends here.

    Attributes:
        code: the exit code: 1 it failed, 2 the words are off.
        details: more lines, shown indented.
    """

    def __init__(self, message: str, code: int = 1, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.details = details


class Parser(argparse.ArgumentParser):
    """A parser that takes no abbreviations, keeps its epilog as written and fails in one line."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise Failure(f"{message} (see `{self.prog} --help`)", 2)

    def parse_all(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse *words*; an unknown flag is an error with the nearest right name."""
        args, unknown = self.parse_known_args(words)
        if unknown:
            raise Failure(f"unknown argument {unknown[0]!r}{self.nearest(unknown[0])} (see `{self.prog} --help`)", 2)
        return args

    def nearest(self, word: str) -> str:
        """A question that names the flag that *word* may have meant, or nothing."""
        known = [option for action in self._actions for option in action.option_strings]
        close = difflib.get_close_matches(word.partition("=")[0], known, 1)
        return f": did you mean {close[0]}?" if close else ""


def add_transfer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that say how KV caches travel, the same for one engine and for a whole cluster."""
    parser.add_argument(
        "--transfer-mode",
        choices=[str(mode) for mode in TransferMode],
        help="who moves the KV cache: in read mode the decode server pulls, in write mode the prefill server pushes "
        "(default: read)",
    )
    parser.add_argument(
        "--bidirectional-kv",
        action=argparse.BooleanOptionalAction,
        help="decode servers keep a turn's KV cache for the next turn's prefill server to pull "
        "(default: $BATON_BIDIRECTIONAL_KV or $VLLM_NEURON_BIDIRECTIONAL_KV, else off)",
    )
    parser.add_argument(
        "--remote-pull-threshold",
        type=count_or_zero,
        metavar="TOKENS",
        help="of a kept turn: fewer than these are computed instead of pulled (default: 64)",
    )


def add_static_shapes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--static-shapes",
        action="store_true",
        help="prefill and decode never share a step, and steps have a few sizes (docs/static-shapes.md)",
    )


def user_path(text: str, what: str) -> Path:
    """A path as a user types it, with ``~`` for a home.

    Raises:
        Failure: it begins with the home of nobody.
    """
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise Failure(f"{what} {text!r}: there is no such home: write the path out", 2) from error


def port_number(text: str) -> int:
    """An argparse type: 1 to 65535."""
    port = decimal(text)
    if port is None or not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (1 to 65535)")
    return port


def count(text: str) -> int:
    """An argparse type: a whole number of 1 or more."""
    return _whole(text, 1)


def count_or_zero(text: str) -> int:
    """An argparse type: a whole number of 0 or more."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    value = decimal(text)
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return value


def servers(text: str) -> int:
    """An argparse type: how many servers of a kind."""
    value = count(text)
    if value > MOST_SERVERS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_SERVERS} servers: give fewer")
    return value


def seconds(text: str) -> float:
    """An argparse type: a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value


def milliseconds(text: str) -> float:
    """An argparse type: a number of milliseconds, 0 or more."""
    return _number(text, 0.0, float("inf"), "a number of milliseconds, 0 or more")


def multiplier(text: str) -> float:
    """An argparse type: a factor of 1 or more."""
    return _number(text, 1.0, float("inf"), "a factor of 1 or more")


def part(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    return _number(text, 0.0, 1.0, "a number from 0 to 1")


def _number(text: str, least: float, most: float, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most or value == float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
