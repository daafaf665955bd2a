"""What `baton up` and `baton plan` are asked for: one way from flags and a cluster file to a planned cluster."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import Any

from baton.cli.parser import Failure, Parser, add_static_shapes, add_transfer_flags, port_number, servers, user_path
from baton.cli.transport import add_transport, transport_of
from baton.cluster import Cluster, Device, Role, TransferMode
from baton.launch import (
    STATIC_SHAPES_FLAG,
    Flags,
    PlanRequest,
    RoleFlags,
    available_cpus,
    available_numa,
    bidirectional_asked,
    dashed,
    plan,
    plan_file,
    read_cluster_file,
)
from baton.models import EMBEDDED

DEFAULT_MODEL = next(iter(EMBEDDED))
_CARRIERS = ("--prefill-args", "--decode-args", "--engine-args")


def add_cluster_flags(parser: Parser) -> None:
    """The flags that describe a cluster."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"an embedded model's name, a folder, or a hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "-f", "--cluster", metavar="FILE", help="a cluster in YAML or JSON; flags win over it (docs/reference.md)"
    )
    for role in Role:
        parser.add_argument(f"--{role}", type=servers, metavar="N", help=f"{role} servers (default: 1)")
    parser.add_argument(
        "--device",
        choices=[str(device) for device in Device],
        help="what engines compute on (default: as vLLM is installed)",
    )
    parser.add_argument(
        "--host",
        help="where everything listens (default: 127.0.0.1); with a file of several hosts: which one is meant, by name",
    )
    parser.add_argument("--port", type=port_number, help="the proxy's (default: 8000)")
    for role, api, side in ((Role.PREFILL, 8100, 5559), (Role.DECODE, 8200, 5659)):
        parser.add_argument(
            f"--{role}-port",
            type=port_number,
            metavar="PORT",
            help=f"API port of the first {role} server; the next takes the next (default: {api})",
        )
        parser.add_argument(
            f"--{role}-side-channel-port",
            type=port_number,
            metavar="PORT",
            help=f"its side channel (default: {side})",
        )
        parser.add_argument(
            f"--{role}-args",
            default="",
            metavar="FLAGS",
            help=f"vllm serve's flags for {role} servers only, in one quoted text",
        )
    add_transfer_flags(parser)
    add_static_shapes(parser)
    parser.add_argument("--engine-args", default="", metavar="FLAGS", help="the same for every engine")
    add_transport(parser)
    parser.add_argument(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        help="whether the proxy does one small hand-off for each pair first (default: --warm-up)",
    )


def planned_cluster(args: argparse.Namespace, words_after: Sequence[str] = ()) -> Cluster:
    """What flags and cluster file come to.

    Args:
        words_after: `vllm serve` flags for every engine, that stand after ``--``.

    Raises:
        LaunchError: they don't go together, or the file is no good.
    """
    for what, value in (("MODEL", args.model), ("--host", args.host)):
        # As an unset variable is, in quotes: a default would be taken in silence.
        if value is not None and not value.strip():
            raise Failure(f"{what} is empty, as a variable is that was never set: name one, or leave it out", 2)
    common = (*quoted(args.engine_args, "--engine-args"), *dashed(words_after))
    if args.static_shapes:
        common += (STATIC_SHAPES_FLAG,)
    proxy_flags = () if args.warm_up is None else ("--warm-up" if args.warm_up else "--no-warm-up",)
    prefill_args = quoted(args.prefill_args, "--prefill-args")
    decode_args = quoted(args.decode_args, "--decode-args")
    travel: dict[str, Any] = {
        "device": None if args.device is None else Device(args.device),
        "transfer_mode": None if args.transfer_mode is None else TransferMode(args.transfer_mode),
        "bidirectional": bidirectional_asked(args.bidirectional_kv, os.environ),
        "pull_threshold": args.remote_pull_threshold,
        "transport": transport_of(args),
    }
    if args.cluster is not None:
        file = read_cluster_file(user_path(args.cluster, "--cluster"))
        roles = {
            Role.PREFILL: RoleFlags(args.prefill, args.prefill_port, args.prefill_side_channel_port, prefill_args),
            Role.DECODE: RoleFlags(args.decode, args.decode_port, args.decode_side_channel_port, decode_args),
        }
        flags = Flags(args.model, args.host, args.port, common, proxy_flags, roles, **travel)
        return plan_file(file, flags, available_cpus(), available_numa())
    given = {
        "prefill": args.prefill,
        "decode": args.decode,
        "host": args.host,
        "proxy_port": args.port,
        "prefill_port": args.prefill_port,
        "decode_port": args.decode_port,
        "prefill_side_port": args.prefill_side_channel_port,
        "decode_side_port": args.decode_side_channel_port,
    }
    return plan(
        PlanRequest(
            model=args.model or DEFAULT_MODEL,
            cpus=available_cpus(),
            numa=available_numa(),
            common_args=common,
            prefill_args=prefill_args,
            decode_args=decode_args,
            proxy_flags=proxy_flags,
            **{name: value for name, value in (given | travel).items() if value is not None},
        )
    )


def split(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our words, and what stands after ``--``: flags for every engine."""
    words = list(words)
    at = words.index("--") if "--" in words else len(words)
    return _joined(words[:at]), tuple(words[at + 1 :])


def _joined(words: Sequence[str]) -> list[str]:
    """*words* with engines' flags joined to the flag that carries them: argparse takes a lone one for one of ours."""
    made: list[str] = []
    for word in words:
        if made and made[-1] in _CARRIERS and word.startswith("-") and word.partition("=")[0] not in _CARRIERS:
            made[-1] += f"={word}"
        else:
            made.append(word)
    return made


def quoted(text: str, flag: str) -> tuple[str, ...]:
    try:
        return dashed(shlex.split(text))
    except ValueError as error:
        raise Failure(f"{flag} {text!r}: {error}", 2) from error
