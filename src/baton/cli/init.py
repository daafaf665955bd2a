"""`baton init`: writes a commented cluster file, from flags or by asking on a terminal."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from baton.cli.cluster_flags import DEFAULT_MODEL
from baton.cli.parser import Failure, Parser, count, port_number, servers, user_path
from baton.cluster import Device, TransferMode
from baton.launch import ClusterFileError, Wish, addresses, read_cluster_file, written

T = TypeVar("T")


def run(words: Sequence[str]) -> int:
    args = _parser().parse_all(words)
    path = user_path(args.file, "FILE")
    if path.suffix == ".json":
        raise Failure(f"{path}: what is written is YAML with comments, and .json is read as JSON: call it .yaml", 2)
    if path.exists() and not path.is_file():
        raise Failure(f"{path} is no file: name another", 2)
    if path.exists() and not args.force:
        raise Failure(
            f"{path} exists, and its comments are yours: name another, edit it, or give --force to replace it",
            2,
        )
    if not path.parent.is_dir():
        raise Failure(f"cannot write {path}: there is no folder {path.parent}")
    wish = _asked(path) if sys.stdin.isatty() and not _described(words) else _wish(args)
    _write(path, written(wish, path.name))
    start = f"baton up -f {args.file}" + (" --host NAME, on each host" if len(wish.hosts) > 1 else "")
    print(f"wrote {args.file}\nwhat it comes to: baton plan -f {args.file}\nstart it: {start}")
    return 0


def _write(path: Path, text: str) -> None:
    """Put a cluster file in its place, whole and read back, or leave what is there as it is.

    Raises:
        Failure: it cannot be written, or what we write is not what we read.
    """
    # A link stays one.
    target = path.resolve()
    # Read by its suffix.
    fresh = target.with_name(f".{target.stem}.{os.getpid()}{target.suffix}")
    try:
        fresh.write_text(text)
        read_cluster_file(fresh)
        if target.exists():
            shutil.copymode(target, fresh)
        fresh.replace(target)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror}") from error
    except ClusterFileError as error:
        raise Failure(str(error).replace(str(fresh), str(path)), 2) from error
    finally:
        fresh.unlink(missing_ok=True)


def _described(words: Sequence[str]) -> bool:
    """Whether *words* say anything of the cluster, and not only where to write."""
    return any(word.startswith("-") and word != "--force" for word in words)


def _wish(args: argparse.Namespace) -> Wish:
    try:
        hosts = _hosts(" ".join(args.hosts))
    except argparse.ArgumentTypeError as error:
        raise Failure(f"--hosts: {error}", 2) from error
    return Wish(
        model=args.model,
        prefill=args.prefill,
        decode=args.decode,
        hosts=hosts,
        device=None if args.device is None else Device(args.device),
        transfer_mode=TransferMode(args.transfer_mode),
        prefill_tensor=args.prefill_tensor_parallel_size,
        decode_tensor=args.decode_tensor_parallel_size,
        port=args.port,
    )


def _asked(path: Path) -> Wish:
    """
    Raises:
        Failure: whoever is asked leaves.
    """
    print(f"A cluster file for {path}. An empty answer takes what stands in brackets; Ctrl-C leaves.")
    try:
        return _ask()
    except (EOFError, KeyboardInterrupt) as error:
        print()
        raise Failure("nothing was written", 130) from error


def _ask(say: Callable[[str], str] = input) -> Wish:
    """Ask for each thing; an empty answer takes what stands in brackets."""

    def ask(question: str, default: str, convert: Callable[[str], T]) -> T:
        while True:
            answer = say(f"{question} [{default}]: ").strip() or default
            try:
                return convert(answer)
            except argparse.ArgumentTypeError as error:
                print(f"  {error}")

    return Wish(
        model=ask("model: an embedded one's name, a folder, or a hub id", DEFAULT_MODEL, str),
        prefill=ask("prefill servers", "1", servers),
        decode=ask("decode servers", "1", servers),
        hosts=ask("addresses of the hosts, with spaces between, or - for this one", "-", _hosts),
        device=ask("device: cpu, cuda, neuron, or - for what is installed", "-", _device),
        transfer_mode=ask("transfer mode: read (decode servers pull) or write (prefill servers push)", "read", _mode),
        port=ask("port of the proxy", "8000", port_number),
    )


def _hosts(text: str) -> tuple[str, ...]:
    """Names or addresses of hosts; none for ``-``."""
    hosts = () if text.strip() in ("", "-") else addresses([text])
    for host in hosts:
        if "/" in host or host.startswith("[") or (host.count(":") == 1):
            raise argparse.ArgumentTypeError(f"{host!r} is more than a host: give its name or address alone")
        if hosts.count(host) > 1:
            raise argparse.ArgumentTypeError(f"{host!r} is named twice")
    return hosts


def _device(text: str) -> Device | None:
    if text != "-" and text not in set(Device):
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(Device)} and -")
    return None if text == "-" else Device(text)


def _mode(text: str) -> TransferMode:
    if text not in set(TransferMode):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {' nor '.join(TransferMode)}")
    return TransferMode(text)


def _parser() -> Parser:
    parser = Parser(
        prog="baton init",
        usage="baton init [FILE] [options]",
        description="Write a commented cluster file. On a terminal it asks, unless flags say what is wanted.",
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
        parser.add_argument(f"--{role}", help=f"{role} servers (default: 1)", **(one | {"type": servers}))
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
