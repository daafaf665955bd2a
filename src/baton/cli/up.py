"""`baton up`: a whole cluster on this host, from nothing to answering."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from baton.cli.cluster_flags import add_cluster_flags, planned_cluster, split
from baton.cli.parser import Failure, Parser, count, seconds
from baton.cli.show import Progress
from baton.cluster import Cluster
from baton.launch import (
    ChildDied,
    ClusterFileError,
    Command,
    LaunchError,
    StartTimeout,
    Supervisor,
    TryoutFailed,
    ask,
    check_cluster,
    cluster_commands,
    default_logs,
    installed_engine,
    start_cluster,
    url_of,
)
from baton.models import ModelError, ResolvedModel, resolve


def run(words: Sequence[str]) -> int:
    words, engine_args = split(words)
    args = _parser().parse_all(words)
    try:
        cluster = planned_cluster(args, engine_args)
        check_here(cluster, args.cluster)
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


def check_here(cluster: Cluster, file: str | None) -> None:
    """Refuse what one host cannot start.

    Raises:
        LaunchError: engines are planned for several hosts.
    """
    if len(cluster.nodes) > 1:
        raise LaunchError(
            f"{file} has engines on {len(cluster.nodes)} hosts ({', '.join(cluster.nodes[:4])}), and `baton up` starts "
            f"those of one: on each, run what `baton plan -f {file} --shell --only HOST` prints"
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
            "  baton up -f examples/2p3d.yaml"
        ),
    )
    add_cluster_flags(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="start, stream the answer to TEXT, and stop")
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="of that answer (default: 32)")
    parser.add_argument(
        "--start-timeout", type=seconds, default=600.0, metavar="S", help="seconds until all must answer (default: 600)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="where logs go (default: a folder under ~/.local/state/baton)")
    parser.add_argument("--dry-run", action="store_true", help="print every environment and command, and stop")
    return parser
