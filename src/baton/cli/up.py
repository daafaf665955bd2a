"""`baton up`: a whole cluster on this host, from nothing to answering."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import secrets
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from baton.cli.cluster_flags import add_cluster_flags, split
from baton.cli.parser import Failure, Parser, count, seconds, user_path
from baton.cli.planning import one_share, refuse, the_model, told
from baton.cli.show import Progress
from baton.cluster import Cluster, Role
from baton.launch import (
    DEFAULT_NAME,
    PROXY,
    SOCKET,
    ChildDied,
    ClusterRecord,
    Command,
    EngineInstall,
    Keeping,
    LaunchError,
    Operator,
    Problem,
    ProcessRecord,
    ProxyClient,
    StartTimeout,
    Supervisor,
    TryoutFailed,
    ask,
    check_cluster,
    check_memory,
    check_name,
    cluster_commands,
    command_of,
    created_at,
    end_left,
    flag_value,
    here,
    holding,
    install_for,
    installed_engine,
    known_names,
    listening,
    load,
    new_logs,
    url_of,
)
from baton.models import ResolvedModel


def run(words: Sequence[str]) -> int:
    words, engine_args = split(words)
    args = _parser().parse_all(words)
    with told():
        check_name(args.name)
        cluster, node = one_share(args, engine_args)
        if args.prompt is not None and PROXY not in here(cluster, node):
            raise LaunchError(f"--prompt asks the proxy, which runs on {cluster.proxy_node}: give it there")
        model = the_model(cluster.model)
        install = installed_engine()
        commands = cluster_commands(cluster, model, install)
    if args.dry_run:
        mine = here(cluster, node)
        print("\n\n".join(f"# {name}\n{command.shell()}" for name, command in commands.items() if name in mine))
        return 0
    try:
        with holding(args.name):
            return _start(args, cluster, model, node=node, install=install, commands=commands)
    except LaunchError as error:
        with contextlib.suppress(LaunchError):
            _refuse_second(load(args.name))
        raise Failure(str(error)) from error


def _start(
    args: argparse.Namespace,
    cluster: Cluster,
    model: ResolvedModel,
    *,
    node: str,
    install: EngineInstall,
    commands: Mapping[str, Command],
) -> int:
    """Look whether it can be, and stay until stopped; the exit code. Nobody else has the cluster's name meanwhile."""
    left = _left_running(args.name, cluster, model)
    if left is None:
        engines = [command for name, command in commands.items() if name != PROXY]
        refuse(check_cluster(cluster, engines, install, local_model=model.local, node=node))
    logs = left.logs if left else _log_folder(args.log_dir)

    on_cpu = model.local and install_for(cluster, install).device == "cpu"
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        return asyncio.run(
            _up(
                args,
                cluster,
                replace(model, served_name=_served_name(cluster, commands) or model.served_name),
                node=node,
                command_of=partial(command_of, model=model, install=install),
                room=partial(_room, on_cpu=on_cpu),
                logs=logs,
                left=left,
            )
        )
    except ChildDied as error:
        raise Failure(str(error), 1, error.last_lines) from error
    except (LaunchError, StartTimeout, TryoutFailed) as error:
        raise Failure(str(error)) from error
    except OSError as error:
        remedy = "mend that, or name other folders with --log-dir and XDG_STATE_HOME"
        raise Failure(f"the cluster is down: {error}: {remedy}") from error


def _log_folder(asked: str | None) -> Path:
    """
    Raises:
        Failure: it cannot be made, or is that of another cluster that runs.
    """
    try:
        if asked is None:
            return new_logs()
        logs = user_path(asked, "--log-dir")
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{error.filename}: {error.strerror}"
        raise Failure(f"cannot make the log folder {where}; name another with --log-dir") from error
    for name in known_names():
        with contextlib.suppress(LaunchError):
            record = load(name)
            if record is not None and record.alive and record.logs.resolve() == logs.resolve():
                raise Failure(f"--log-dir {asked} holds the logs of the cluster {name!r}, which runs: name another")
    return logs


def _room(commands: list[Command], *, on_cpu: bool) -> list[Problem]:
    """What keeps more engines from being started: too little memory, where that can be known."""
    return check_memory(commands) if on_cpu else []


def _served_name(cluster: Cluster, commands: Mapping[str, Command]) -> str | None:
    """What clients call the model: a flag may say otherwise than its folder."""
    return flag_value(commands[cluster.of_role(Role.DECODE)[0].id].argv, "--served-model-name")


def _refuse_second(record: ClusterRecord | None) -> None:
    """
    Raises:
        Failure: another supervisor runs the cluster of *record*.
    """
    if record is not None and record.supervised and record.supervisor.pid != os.getpid():
        raise Failure(
            f"the cluster {record.name!r} is up already (supervisor pid {record.supervisor.pid}): look with "
            "`baton status`, end it with `baton down`, or start another one with --name"
        )


def _left_running(name: str, cluster: Cluster, model: ResolvedModel) -> ClusterRecord | None:
    """What a supervisor that is gone has left running under this name, and is to be taken over; None for nothing.

    Raises:
        Failure: there is a cluster of that name that cannot be taken over.
    """
    try:
        record = load(name)
    except LaunchError as error:
        raise Failure(str(error)) from error
    _refuse_second(record)
    if record is None:
        return None
    if not record.alive:
        asyncio.run(end_left(record, lambda _: None))
        return None
    if (record.asked, record.model_folder) != (cluster, model.target):
        raise Failure(
            f"the cluster {name!r} was left running by a supervisor that is gone, and was asked for in other words: "
            "end it with `baton down`, or start another one with --name"
        )
    return record


async def _up(
    args: argparse.Namespace,
    cluster: Cluster,
    model: ResolvedModel,
    *,
    node: str,
    command_of: Callable[[Cluster, str], Command],
    room: Callable[[list[Command]], list[Problem]],
    logs: Path,
    left: ClusterRecord | None,
) -> int:
    """Start or take over, say so, and stay until stopped; 130 when Ctrl-C ended the start, else 0."""
    stop = asyncio.Event()
    heed(stop)
    url, fronted = url_of(cluster.proxy_host, cluster.proxy_port, ""), PROXY in here(cluster, node)
    print(f"logs: {logs}", flush=True)
    mark, scratch = (left.run, left.scratch) if left is not None else (secrets.token_hex(8), None)
    async with Supervisor(logs, mark, scratch) as supervisor:
        me = ProcessRecord(name="supervisor", pid=os.getpid(), created=created_at(os.getpid()), log=logs)
        record = ClusterRecord(
            name=args.name,
            run=mark,
            supervisor=me,
            control=supervisor.scratch / SOCKET,
            scratch=supervisor.scratch,
            logs=logs,
            asked=cluster,
            cluster=cluster if left is None else left.cluster,
            node=node,
            model_folder=model.target,
            served_model=model.served_name,
            restarts=args.restart == "on-failure",
        )
        keeping = Keeping(
            restarts=record.restarts,
            start_seconds=args.start_timeout,
            drain_seconds=args.drain_timeout,
            log_bytes=args.log_max_mb << 20,
        )
        proxy = ProxyClient.of(record.cluster, os.environ)
        operator = Operator(supervisor, record, command_of, proxy, keeping=keeping, environ=os.environ, room=room)
        try:
            await operator.begin(left.processes if left is not None else ())
            # From here on `baton status` is told what each process is doing.
            async with listening(operator, record.control):
                with Progress(supervisor) as progress:
                    if not await _unless(stop, supervisor.until_ready(args.start_timeout, progress.update)):
                        print("stopping", flush=True)
                        return 130
                operator.write()
                slowest = max(child.seconds for child in supervisor.children)
                what = url if fronted else f"the share of {node}; the proxy is on {cluster.proxy_node}"
                print(f"taken over: {what}" if left else f"ready after {slowest:.0f} s: {what}", flush=True)
                if args.prompt is not None:
                    asking = ask(cluster, model.served_name, args.prompt, args.max_tokens, print_text)
                    answered = await _unless(stop, supervisor.watching(asking))
                    if answered:
                        print("\nto keep it running: baton up", flush=True)
                    return 0 if answered else 130
                print("try:\n" + _curl(url, model.served_name) if fronted else "", flush=True)
                operator.opens()
                print("Ctrl-C stops everything", flush=True)
                await _unless(stop, operator.keep())
            print("stopping", flush=True)
        finally:
            await asyncio.shield(operator.close())
    return 0


def heed(stop: asyncio.Event) -> None:
    """Set *stop* at Ctrl-C, SIGTERM, and SIGHUP: a terminal that is closed. Who ignores that, by nohup, goes on."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


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
            "  baton up -f examples/2p3d.yaml\n"
            "  baton up -f examples/neuron-2p3d-hosts.yaml --host p0"
        ),
    )
    add_cluster_flags(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="start, stream the answer to TEXT, and stop")
    parser.add_argument("--max-tokens", type=count, default=32, metavar="N", help="of that answer (default: 32)")
    parser.add_argument(
        "--start-timeout", type=seconds, default=600.0, metavar="S", help="seconds until all must answer (default: 600)"
    )
    parser.add_argument(
        "--name",
        default=DEFAULT_NAME,
        help=f"of this cluster, for `baton status` and the like (default: {DEFAULT_NAME})",
    )
    parser.add_argument(
        "--restart",
        choices=("on-failure", "never"),
        default="on-failure",
        help="what to do when a process ends by itself once all have answered: start it again, waiting longer each "
        "time, or stop everything (default: on-failure)",
    )
    parser.add_argument(
        "--drain-timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds that requests may go on when their instance is to go (default: 120)",
    )
    parser.add_argument(
        "--log-max-mb", type=count, default=64, metavar="N", help="of a log before it is moved aside (default: 64)"
    )
    parser.add_argument("--log-dir", metavar="DIR", help="where logs go (default: a folder under ~/.local/state/baton)")
    parser.add_argument("--dry-run", action="store_true", help="print every environment and command, and stop")
    return parser
