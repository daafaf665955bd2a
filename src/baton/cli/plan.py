"""`baton plan`: what `baton up` would start, with every port, device and command. Starts nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from baton.cli.cluster_flags import add_cluster_flags, split
from baton.cli.parser import Failure, Parser, user_path
from baton.cli.planning import find_model, one_share, refuse, shared, told
from baton.cluster import THIS_HOST
from baton.launch import (
    Command,
    Process,
    as_shell,
    as_text,
    as_value,
    available_bytes,
    check_cluster,
    check_plan,
    cluster_commands,
    dumps,
    estimates,
    install_for,
    installed_engine,
    processes,
    schema,
)


def run(words: Sequence[str]) -> int:
    words, engine_args = split(words)
    args = _parser().parse_all(words)
    if args.schema:
        if args.output is not None:
            raise Failure("--schema prints the schema and writes no scripts: leave --output out", 2)
        print(dumps(schema()))
        return 0
    with told():
        # Only a host can be looked at: the one that this is.
        cluster, node = one_share(args, engine_args) if args.check else shared(args, engine_args)
        model = find_model(cluster)
        install = installed_engine()
        commands = cluster_commands(cluster, model, install)
        engines = [commands[each.id] for each in cluster.instances]
        if args.check:
            problems = check_cluster(cluster, engines, install, local_model=model.local, node=node)
        else:
            problems = check_plan(cluster, engines, install, local_model=model.local)
    on_cpu = install_for(cluster, install).device == "cpu"
    known: Mapping[str, Command] = {each.id: commands[each.id] for each in cluster.instances}
    environ = os.environ if len(cluster.nodes) == 1 else {}
    hosts = processes(cluster, commands, estimates(known, environ) if on_cpu and model.local else {})
    if node is not None:
        hosts = {node: hosts[node]}
    if args.json:
        if args.output is not None:
            _scripts(hosts, args.output, said=False)
        print(dumps(as_value(cluster, hosts, [problem.what for problem in problems])))
    elif args.shell or args.output is not None:
        _scripts(hosts, args.output)
    else:
        print(as_text(cluster, hosts, available_bytes() if cluster.nodes == (THIS_HOST,) else None))
    refuse(problems)
    return 0


def _scripts(hosts: Mapping[str, list[Process]], folder: str | None, *, said: bool = True) -> None:
    """Print the script of the one host, or write one a host and, if it is to be *said*, print where."""
    if folder is None:
        if len(hosts) > 1:
            raise Failure(
                f"--shell makes a script a host, and the plan has {len(hosts)}: choose one with --host "
                f"{next(iter(hosts))}, or write all with --output DIR",
                2,
            )
        print(*(as_shell(name, found) for name, found in hosts.items()), sep="", end="")
        return
    for path, (name, found) in zip(_paths(hosts, folder), hosts.items(), strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(as_shell(name, found))
            path.chmod(0o755)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise Failure(f"--output {folder}: cannot write {str(path)!r}: {why}") from error
        if said:
            print(path)


def _paths(hosts: Iterable[str], folder: str) -> list[Path]:
    """A file for each host.

    Raises:
        Failure: two of them would be one.
    """
    folder_path = user_path(folder, "--output")
    owners: dict[Path, str] = {}
    for name in hosts:
        path = folder_path / f"{name.replace('/', '_')}.sh"
        first = owners.setdefault(path, name)
        if first != name:
            raise Failure(
                f"--output {folder}: the hosts {first} and {name} would both be {path}: rename one of them", 2
            )
    return list(owners)


def _parser() -> Parser:
    parser = Parser(
        prog="baton plan",
        usage="baton plan [MODEL] [options] [-- vllm serve's flags for every engine]",
        description="What `baton up` would start: ports, devices, environment and command of every process, by host.",
        epilog=(
            "examples:\n"
            "  baton plan --prefill 2 --decode 3\n"
            "  baton plan -f examples/cuda-2p3d-hosts.yaml\n"
            "  baton plan -f examples/cuda-2p3d-hosts.yaml --host one --shell\n"
            "  baton plan -f examples/cuda-2p3d-hosts.yaml --output scripts\n"
            "  baton plan --schema > baton.schema.json"
        ),
    )
    add_cluster_flags(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="for programs")
    shape.add_argument("--shell", action="store_true", help="a shell script that runs one host's share")
    shape.add_argument("--schema", action="store_true", help="print the JSON schema of cluster files, and stop")
    parser.add_argument("--output", metavar="DIR", help="write the script of every host to DIR/HOST.sh")
    parser.add_argument(
        "--check", action="store_true", help="look at this machine too: ports, memory, packages, as `baton up` does"
    )
    return parser
