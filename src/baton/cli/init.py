"""`baton init`: writes a commented cluster file, from flags or by asking on a terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from baton.cli.cluster_flags import DEFAULT_MODEL
from baton.cli.parser import Failure, Parser, count, port_number
from baton.cluster import Device, TransferMode
from baton.launch import ClusterFileError, Wish, addresses, read_cluster_file, written

T = TypeVar("T")


def run(words: Sequence[str]) -> int:
    args = _parser().parse_all(words)
    path = Path(args.file).expanduser()
    if path.exists() and not args.force:
        raise Failure(
            f"{path} exists, and its comments are yours: name another, edit it, or give --force to replace it",
            2,
        )
    asked = sys.stdin.isatty() and not words
    wish = _ask() if asked else _wish(args)
    if len(set(wish.hosts)) < len(wish.hosts):
        raise Failure(f"--hosts {' '.join(wish.hosts)}: a host is named twice", 2)
    try:
        path.write_text(written(wish, path.name))
        # What we write must be what we read.
        read_cluster_file(path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from error
    except ClusterFileError as error:
        raise Failure(str(error), 2) from error
    print(f"wrote {path}; see what it comes to: baton plan -f {path}")
    return 0


def _wish(args: argparse.Namespace) -> Wish:
    return Wish(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        hosts=addresses(args.hosts),
        device=None if args.device is None else Device(args.device),
        transfer_mode=TransferMode(args.transfer_mode),
        prefill_tensor=args.prefill_tensor_parallel_size,
        decode_tensor=args.decode_tensor_parallel_size,
        port=args.port,
    )


def _ask(say: Callable[[str], str] = input) -> Wish:
    """Ask for each thing; an empty answer takes what stands in brackets."""

    def ask(question: str, default: str, convert: Callable[[str], T]) -> T:
        while True:
            answer = say(f"{question} [{default}]: ").strip() or default
            try:
                return convert(answer)
            except (argparse.ArgumentTypeError, ValueError) as error:
                print(f"  {error}")

    return Wish(
        model=ask("model: an embedded one's name, a folder, or a hub id", DEFAULT_MODEL, str),
        prefill=ask("prefill servers", "1", count),
        decode=ask("decode servers", "1", count),
        hosts=ask("addresses of the hosts, - for this one", "-", lambda text: () if text == "-" else addresses([text])),
        device=ask("device: cpu, cuda, neuron, or - for what is installed", "-", _device),
        transfer_mode=ask("transfer mode: read or write", "read", TransferMode),
        port=ask("port of the proxy", "8000", port_number),
    )


def _device(text: str) -> Device | None:
    return None if text == "-" else Device(text)


def _parser() -> Parser:
    parser = Parser(
        prog="baton init",
        usage="baton init [FILE] [options]",
        description="Write a commented cluster file. On a terminal and without any word it asks.",
        epilog=(
            "examples:\n"
            "  baton init\n"
            "  baton init big.yaml --prefill 2 --decode 3 --model org/name --hosts 10.0.1.10 10.0.1.11"
        ),
    )
    parser.add_argument("file", nargs="?", default="baton.yaml", metavar="FILE", help="(default: baton.yaml)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"(default: {DEFAULT_MODEL})")
    for role in ("prefill", "decode"):
        one: dict[str, Any] = {"type": count, "default": 1, "metavar": "N"}
        parser.add_argument(f"--{role}", help=f"{role} servers (default: 1)", **one)
        parser.add_argument(f"--{role}-tensor-parallel-size", help="ranks of each (default: 1)", **one)
    parser.add_argument(
        "--hosts",
        nargs="+",
        default=[],
        metavar="ADDRESS",
        help="hosts to spread engines over (default: this one)",
    )
    parser.add_argument("--device", choices=[str(device) for device in Device], help="(default: as vLLM is installed)")
    parser.add_argument("--transfer-mode", choices=[str(mode) for mode in TransferMode], default="read")
    parser.add_argument("--port", type=port_number, default=8000, help="the proxy's (default: 8000)")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")
    return parser
