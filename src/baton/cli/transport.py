"""The flags of `baton engine` and `baton up` that say what the KV cache travels over."""

from __future__ import annotations

import argparse

from baton.cli.parser import Parser, count_or_zero
from baton.cluster import TransferBackend, Transport


def add_transport(parser: Parser) -> None:
    parser.add_argument(
        "--transfer-backend",
        choices=[str(backend) for backend in TransferBackend],
        help="NIXL's backend that moves the KV cache (default: UCX)",
    )
    parser.add_argument(
        "--ucx-tls",
        metavar="LIST",
        help="UCX's transports, such as tcp,cma,self (default: $UCX_TLS, else all but posix and sysv on CPU)",
    )
    parser.add_argument(
        "--nixl-threads",
        type=count_or_zero,
        metavar="N",
        help="threads of NIXL beside its progress thread (default: 1 on CPU, else vLLM's own 4)",
    )


def transport_of(args: argparse.Namespace) -> Transport:
    backend = None if args.transfer_backend is None else TransferBackend(args.transfer_backend)
    return Transport(backend=backend, ucx_tls=args.ucx_tls, threads=args.nixl_threads)
