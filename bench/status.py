#!/usr/bin/env python3
"""How long `baton status` takes with many instances: the answer itself, and with the start of its process.

The lab plays the engines, all in one process, behind Baton's proxy; a supervisor's control socket answers for them as
that of `baton up` does, out of a record on disk.

usage: python -m bench.status [--instances 1000] [--rounds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
from bench.timing import HEAD, Round, row, timed
from tests.ports import free_ports, free_range

from baton.cluster import Cluster, Instance, Role
from baton.launch import (
    SOCKET,
    ClusterRecord,
    Keeping,
    Operator,
    ProcessRecord,
    ProxyClient,
    Supervisor,
    created_at,
    listening,
    load,
    observe,
    observe_proxy,
)
from baton.launch.record import save
from baton.launch.supervisor import READY, Adopted, Child

BATON = (sys.executable, "-m", "baton.cli")
START_SECONDS = 120.0


class Standing:
    """In a child process's place: one that runs."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None


def cluster_of(first: int, proxy: int, instances: int) -> Cluster:
    """The lab's engines as a plan has them, from port *first* on: prefill servers, then as many decode servers."""
    half = instances // 2
    made = []
    for index in range(instances):
        role = Role.PREFILL if index < half else Role.DECODE
        name = f"{role.letter}{index if index < half else index - half}"
        port = first + index
        made.append(Instance(id=name, role=role, host="127.0.0.1", port=port, side_channel_port=1 + index))
    return Cluster(model="sim", proxy_port=proxy, instances=tuple(made))


async def supervise(cluster: Cluster, folder: Path) -> None:
    """Answer for *cluster* as the supervisor of `baton up` does, until killed; says ``up``."""
    environ = {"XDG_STATE_HOME": str(folder)}
    me = ProcessRecord(name="supervisor", pid=os.getpid(), created=created_at(os.getpid()), log=folder)
    names = [*(each.id for each in cluster.instances), "proxy"]
    async with Supervisor(folder / "logs", "run") as supervisor:
        process = cast(Adopted, Standing())

        async def good() -> bool:
            return True

        supervisor.children = [
            Child(name, process, folder / f"{name}.log", good, time.monotonic(), READY, 0.0) for name in names
        ]
        record = ClusterRecord(
            name="default",
            run="run",
            supervisor=me,
            control=supervisor.scratch / SOCKET,
            scratch=supervisor.scratch,
            logs=folder / "logs",
            asked=cluster,
            cluster=cluster,
            model_folder="/m",
            served_model="sim",
            processes=tuple(me.model_copy(update={"name": name}) for name in names),
        )
        save(record, environ)
        proxy = ProxyClient.of(cluster, {})
        operator = Operator(supervisor, record, cast(Any, None), proxy, keeping=Keeping(), environ=environ)
        try:
            async with listening(operator, record.control):
                print("up", flush=True)
                await asyncio.Event().wait()
        finally:
            # Nobody is to be ended.
            supervisor.children = []


@contextlib.contextmanager
def running(argv: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(argv, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait_for(url: str, good: Callable[[Any], bool]) -> None:
    """Until what *url* answers is *good*."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(OSError, ValueError), urllib.request.urlopen(url, timeout=10) as response:
            if good(json.load(response)):
                return
        if time.monotonic() > deadline:
            raise SystemExit(f"{url} is not good after {START_SECONDS:g} s")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--supervise", nargs=3, metavar=("FIRST", "PROXY", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.supervise:
        first, proxy, folder = args.supervise
        asyncio.run(supervise(cluster_of(int(first), int(proxy), args.instances), Path(folder)))
        return 0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    half, count = args.instances // 2, str(args.instances)
    first, (proxy,) = free_range(args.instances), free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        environ = {**os.environ, "XDG_STATE_HOME": folder}
        lab = [*BATON, "sim", "--prefill", str(half), "--decode", str(args.instances - half), "--port", str(first)]
        me = [sys.executable, "-m", "bench.status", "--instances", count, "--supervise", str(first), str(proxy), folder]
        with (
            running([*lab, "--proxy", "--proxy-port", str(proxy)], environ),
            running(me, environ) as supervisor,
        ):
            url = f"http://127.0.0.1:{proxy}"
            wait_for(f"{url}/health", lambda said: all(said[role]["usable"] == said[role]["known"] for role in Role))
            assert supervisor.stdout is not None
            assert supervisor.stdout.readline() == "up\n"
            report(url, environ, args.rounds)
    return 0


def report(url: str, environ: dict[str, str], rounds: int) -> None:
    def shown(what: str, found: list[Round]) -> str:
        return row(what, found, 1000, 0)

    def record() -> ClusterRecord:
        found = load("default", environ)
        assert found is not None
        return found

    def own() -> str:
        return orjson.dumps(asyncio.run(observe(record(), environ))).decode()

    def fleet() -> str:
        return orjson.dumps(asyncio.run(observe_proxy(ProxyClient(url)))).decode()

    def command(*words: str) -> Callable[[], object]:
        # Its exit code says that all is well, which on a busy machine not all probes do.
        return lambda: subprocess.run(words, env=environ, stdout=subprocess.DEVNULL, check=False)

    seen = json.loads(own())
    states = {(row["state"], (row["proxy"] or {"usable": True})["usable"]) for row in seen["processes"]}
    assert states == {("ready", True)}, states
    print(f"{len(seen['processes'])} processes\n")
    print(f"milliseconds\n\n{HEAD}")
    print(shown("reading the record", timed(record, rounds)))
    print(shown("the answer: record, supervisor, proxy, JSON", timed(own, rounds)))
    print(shown("the answer of `--proxy URL`", timed(fleet, rounds)))
    print(shown("Python's start", timed(command(sys.executable, "-c", "pass"), rounds)))
    print(
        row("that and the command's imports", timed(command(sys.executable, "-c", "import baton.cli.status"), rounds))
    )
    print(shown("`baton status --json`, all of it", timed(command(*BATON, "status", "--json"), rounds)))
    print(shown("`baton status`, all of it", timed(command(*BATON, "status"), rounds)))
    proxied = command(*BATON, "status", "--proxy", url, "--json")
    print(shown("`baton status --proxy URL --json`, all of it", timed(proxied, rounds)))


if __name__ == "__main__":
    sys.exit(main())
