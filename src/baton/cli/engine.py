"""`baton engine`: checks, then becomes one vLLM server in a role."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from baton.cli.parser import Failure, Parser, add_static_shapes, add_transfer_flags, count_or_zero, port_number
from baton.cli.planning import refuse, the_model, told
from baton.cli.transport import add_transport, transport_of
from baton.cluster import Role, TransferMode
from baton.engine import parse_cpus
from baton.launch import (
    STATIC_SHAPES_FLAG,
    EngineRequest,
    available_cpus,
    bidirectional_asked,
    check_engine,
    dashed,
    engine_command,
    installed_engine,
)


def run(words: Sequence[str]) -> int:
    parser = _parser()
    args, vllm_args = parser.parse_known_args(dashed(words))
    _check_words(vllm_args)
    with told():
        model = the_model(args.model)
        install = installed_engine()
        request = EngineRequest(
            role=Role(args.role),
            vllm_args=(*vllm_args, *((STATIC_SHAPES_FLAG,) if args.static_shapes else ())),
            side_channel_host=args.side_channel_host,
            side_channel_port=args.side_channel_port,
            cpus=args.cpus,
            available_cpus=available_cpus(),
            nixl_nap_us=args.nixl_nap_us,
            transfer_mode=TransferMode(args.transfer_mode or "read"),
            bidirectional=bidirectional_asked(args.bidirectional_kv, os.environ),
            pull_threshold=args.remote_pull_threshold,
            transport=transport_of(args),
        )
        command = engine_command(request, model, install, os.environ)
    if args.dry_run:
        print(command.shell())
        return 0
    refuse(check_engine(command, install, local_model=model.local))
    sys.stdout.flush()
    # The same process goes on as the engine: its pid, its signals and its exit code are the caller's.
    os.execvpe(command.argv[0], command.argv, {**os.environ, **command.environ})


def _parser() -> Parser:
    parser = Parser(
        prog="baton engine",
        usage="baton engine MODEL --role prefill|decode [options] [vllm serve's flags]",
        description="One vLLM server in a role. Every flag of `vllm serve` passes through.",
        epilog=(
            "examples:\n"
            "  baton engine smollm2-135m-instruct --role prefill --port 8100 --side-channel-port 5559\n"
            "  baton engine smollm2-135m-instruct --role decode --port 8200 --side-channel-port 5659 --max-num-seqs 8\n"
            "vLLM's own flags: python -m baton.engine.serve --help=all"
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="an embedded model's name, a folder, or a hub id")
    parser.add_argument("--role", required=True, choices=[str(role) for role in Role], help="the phase it runs")
    add_transfer_flags(parser)
    add_transport(parser)
    parser.add_argument(
        "--side-channel-host",
        metavar="HOST",
        help="where NIXL's metadata exchange binds, advertised to peers "
        "(default: $VLLM_NIXL_SIDE_CHANNEL_HOST, else 127.0.0.1)",
    )
    parser.add_argument(
        "--side-channel-port",
        type=port_number,
        metavar="PORT",
        help="its first port, one a data-parallel rank (default: $VLLM_NIXL_SIDE_CHANNEL_PORT, "
        "else 5559 for prefill and 5659 for decode)",
    )
    parser.add_argument(
        "--cpus", type=_cpus, default=(), metavar="LIST", help="cores it may use, such as 0-3,8 (default: all)"
    )
    add_static_shapes(parser)
    parser.add_argument(
        "--nixl-nap-us",
        type=count_or_zero,
        metavar="US",
        help="sleep of NIXL's progress thread between two polls, in microseconds; 0 spins on a core (default: 500)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the environment and the command, and stop")
    return parser


def _check_words(vllm_args: Sequence[str]) -> None:
    """The mistakes that argparse would hand to vLLM in silence."""
    if vllm_args and not vllm_args[0].startswith("-"):
        raise Failure(f"unexpected word {vllm_args[0]!r} after MODEL: flags start with --", 2)


def _cpus(text: str) -> tuple[int, ...]:
    try:
        cpus = parse_cpus(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    missing = sorted(set(cpus) - set(available_cpus()))
    if not cpus or missing:
        have = ",".join(map(str, available_cpus()))
        raise argparse.ArgumentTypeError(f"{text!r} names cores that are not here: there are {have}")
    return cpus
