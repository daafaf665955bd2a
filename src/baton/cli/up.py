"""`baton up`: a whole cluster on this host, from nothing to answering."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from baton.cli.parser import Failure, Parser, add_static_shapes, add_transfer_flags, count, port_number, seconds
from baton.cli.show import Progress
from baton.cli.transport import add_transport, transport_of
from baton.cluster import Cluster, Role, TransferMode
from baton.launch import (
    STATIC_SHAPES_FLAG,
    ChildDied,
    ClusterFileError,
    Command,
    Flags,
    LaunchError,
    PlanRequest,
    RoleFlags,
    StartTimeout,
    Supervisor,
    TryoutFailed,
    ask,
    available_cpus,
    bidirectional_asked,
    check_cluster,
    cluster_commands,
    dashed,
    default_logs,
    installed_engine,
    plan,
    plan_file,
    read_cluster_file,
    start_cluster,
    url_of,
)
from baton.models import EMBEDDED, ModelError, ResolvedModel, resolve

DEFAULT_MODEL = next(iter(EMBEDDED))


def run(words: Sequence[str]) -> int:
    words, engine_args = _split(words)
    args = _parser().parse_all(words)
    common = (*_quoted(args.engine_args, "--engine-args"), *dashed(engine_args))
    if args.static_shapes:
        common += (STATIC_SHAPES_FLAG,)
    try:
        cluster = _planned(args, common)
        model = resolve(cluster.model, report=lambda line: print(f"{line} ...", file=sys.stderr, flush=True))
        install = installed_engine()
        commands = cluster_commands(cluster, model, install)
    except ClusterFileError as error:
        raise Failure(str(error), 2, error.others) from error
    except LaunchError as error:
        raise Failure(str(error), 2) from error
    except ModelError as error:
        raise Failure(str(error)) from error
    if args.dry_run:
        print("\n\n".join(f"# {name}\n{command.shell()}" for name, command in commands.items()))
        return 0
    engines = [command for name, command in commands.items() if name != "proxy"]
    problems = check_cluster(cluster, engines, install, local_model=model.local)
    if problems:
        code = 2 if all(problem.words for problem in problems) else 1
        raise Failure(problems[0].what, code, [problem.what for problem in problems[1:]])
    logs = Path(args.log_dir).expanduser() if args.log_dir else default_logs()
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"cannot make the log folder {logs}: {error.strerror}; name another with --log-dir") from error
    try:
        return asyncio.run(_up(args, cluster, model, commands, logs))
    except ChildDied as error:
        raise Failure(str(error), 1, error.last_lines) from error
    except (StartTimeout, TryoutFailed) as error:
        raise Failure(str(error)) from error


def _planned(args: argparse.Namespace, common: tuple[str, ...]) -> Cluster:
    """What flags and cluster file come to.

    Raises:
        LaunchError: they don't go together, or the file is no good.
    """
    proxy_flags = () if args.warm_up is None else ("--warm-up" if args.warm_up else "--no-warm-up",)
    prefill_args = _quoted(args.prefill_args, "--prefill-args")
    decode_args = _quoted(args.decode_args, "--decode-args")
    travel: dict[str, Any] = {
        "transfer_mode": None if args.transfer_mode is None else TransferMode(args.transfer_mode),
        "bidirectional": bidirectional_asked(args.bidirectional_kv, os.environ),
        "pull_threshold": args.remote_pull_threshold,
        "transport": transport_of(args),
    }
    if args.cluster is not None:
        file = read_cluster_file(Path(args.cluster).expanduser())
        roles = {
            Role.PREFILL: RoleFlags(args.prefill, args.prefill_port, args.prefill_side_channel_port, prefill_args),
            Role.DECODE: RoleFlags(args.decode, args.decode_port, args.decode_side_channel_port, decode_args),
        }
        flags = Flags(args.model, args.host, args.port, common, proxy_flags, roles, **travel)
        return plan_file(file, flags, available_cpus())
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
            common_args=common,
            prefill_args=prefill_args,
            decode_args=decode_args,
            proxy_flags=proxy_flags,
            **{name: value for name, value in (given | travel).items() if value is not None},
        )
    )


async def _up(
    args: argparse.Namespace, cluster: Cluster, model: ResolvedModel, commands: dict[str, Command], logs: Path
) -> int:
    """Start, say so, and stay until stopped; 130 when Ctrl-C ended the start, else 0."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    url = url_of(cluster.proxy_host, cluster.proxy_port, "")
    print(f"logs: {logs}", flush=True)
    async with Supervisor(logs) as supervisor:
        with Progress(supervisor) as progress:
            await start_cluster(supervisor, cluster, commands)
            if not await _unless(stop, supervisor.until_ready(args.start_timeout, progress.update)):
                print("stopping", flush=True)
                return 130
        slowest = max(child.seconds for child in supervisor.children)
        print(f"ready after {slowest:.0f} s: {url}", flush=True)
        if args.prompt is not None:
            asking = ask(cluster, model.served_name, args.prompt, args.max_tokens, print_text)
            answered = await _unless(stop, supervisor.watching(asking))
            if answered:
                print("\nto keep it running: baton up", flush=True)
            return 0 if answered else 130
        print("try:\n" + _curl(url, model.served_name) + "\nCtrl-C stops everything", flush=True)
        await _unless(stop, supervisor.until_death())
        print("stopping", flush=True)
    return 0


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do *work* until it is done or *stop* is set; whether it was done. Its errors are raised here."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        return False
    task.result()
    return True


def print_text(text: str) -> None:
    print(text, end="", flush=True)


def _curl(url: str, model: str) -> str:
    return (
        f"  curl -s {url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", "prompt": "Count the number 1, 2, 3", "max_tokens": 20, "temperature": 0}}\''
    )


def _split(words: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Our words, and what stands after ``--``: flags for every engine."""
    words = list(words)
    if "--" not in words:
        return words, ()
    at = words.index("--")
    return words[:at], tuple(words[at + 1 :])


def _quoted(text: str, flag: str) -> tuple[str, ...]:
    try:
        return dashed(shlex.split(text))
    except ValueError as error:
        raise Failure(f"{flag} {text!r}: {error}", 2) from error


def _parser() -> Parser:
    parser = Parser(
        prog="baton up",
        usage="baton up [MODEL] [options] [-- vllm serve's flags for every engine]",
        description="Start prefill and decode servers and the proxy on this host, and stop them together.",
        epilog=(
            "examples:\n"
            "  baton up\n"
            "  baton up --prompt 'Count the number 1, 2, 3'\n"
            "  baton up ./my-model --decode 2 -- --max-num-seqs 8\n"
            "  baton up --cluster examples/2p3d.yaml"
        ),
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"an embedded model's name, a folder, or a hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--cluster", metavar="FILE", help="a cluster in YAML or JSON; flags win over it (docs/reference.md)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="start, stream the answer to TEXT, and stop")
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="of that answer (default: 32)")
    for role in Role:
        parser.add_argument(f"--{role}", type=count, metavar="N", help=f"{role} servers (default: 1)")
    parser.add_argument("--host", help="where everything listens (default: 127.0.0.1)")
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
    parser.add_argument(
        "--start-timeout", type=seconds, default=600.0, metavar="S", help="seconds until all must answer (default: 600)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="where logs go (default: a folder under ~/.local/state/baton)")
    parser.add_argument("--dry-run", action="store_true", help="print every environment and command, and stop")
    return parser
