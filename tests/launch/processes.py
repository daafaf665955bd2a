"""Small processes in an engine's and a proxy's place: they answer what a launcher asks.

usage: python -m tests.launch.processes engine PORT [outlived] [stubborn] | proxy PORT ROLE=URL ... |
       up NAME FOLDER PORTS [outlived] [stubborn]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from baton.cluster import Cluster, Instance, Role
from baton.launch import Command, ProxyClient, Supervisor
from baton.launch.control import SOCKET, listening
from baton.launch.operate import Keeping, Operator
from baton.launch.record import ClusterRecord, ProcessRecord, created_at, holding

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_running{engine="1"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
vllm:nixl_bytes_transferred_sum{engine="0"} 1.5e+06
vllm:other 1
"""


class Answers(BaseHTTPRequestHandler):
    """Answers out of ``answer``: method, path, body to status and value."""

    answer: Callable[[str, str, Any], tuple[int, Any]]

    def _do(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        status, value = type(self).answer(self.command, self.path, body)
        raw = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = do_DELETE = _do  # noqa: N815 (the names that http.server looks for)

    def log_message(self, *_: Any) -> None:
        pass


def serve(port: int, answer: Callable[[str, str, Any], tuple[int, Any]]) -> None:
    handler = type("Handler", (Answers,), {"answer": staticmethod(answer)})
    ThreadingHTTPServer(("127.0.0.1", port), handler).serve_forever()


def engine(port: int, how: list[str]) -> None:
    """
    Args:
        how: ``outlived``: it forks one that does not end with it; ``stubborn``: it must be killed.
    """
    if "stubborn" in how:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "outlived" in how and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    print(f"an engine in process {os.getpid()}", flush=True)

    def answer(_: str, path: str, __: Any) -> tuple[int, Any]:
        return {"/metrics": (200, METRICS), "/version": (200, {"version": "0.32.0"})}.get(path, (200, {}))

    serve(port, answer)


def proxy(port: int, engines: list[str]) -> None:
    """As Baton's, as far as a launcher sees it: an id is never given twice."""
    numbers = itertools.count()
    rows: dict[str, dict[str, Any]] = {}

    def add(role: str, url: str) -> None:
        there = [row for row in rows.values() if row["url"] == url]
        name = there[0]["id"] if there else f"i{next(numbers)}"
        rows[name] = {"id": name, "role": role, "url": url, "usable": True, "draining": False, "in_flight": 0}

    for each in engines:
        add(*each.split("=", 1))

    def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
        match method, path.strip("/").split("/"):
            case "GET", ["health"]:
                known = {str(role): sum(row["role"] == role for row in rows.values()) for role in Role}
                return 200, {role: {"usable": count, "known": count} for role, count in known.items()}
            case "GET", ["instances"]:
                return 200, {"instances": list(rows.values())}
            case "POST", ["instances"]:
                add(body["role"], body["url"])
                return 201, {}
            case "POST", ["instances", name, "drain"] if name in rows:
                rows[name] |= {"usable": False, "draining": True}
                return 202, {}
            case "DELETE", ["instances", name] if name in rows:
                del rows[name]
                return 200, {}
        return 404, {"error": f"nothing at {path}"}

    serve(port, answer)


def command_of(cluster: Cluster, name: str, how: tuple[str, ...] = ()) -> Command:
    """The command of one process of a cluster made of these; *how* its engines are."""
    words = (sys.executable, "-m", "tests.launch.processes")
    if name == "proxy":
        known = (f"{each.role}={each.url}" for each in cluster.instances)
        return Command({}, (*words, "proxy", str(cluster.proxy_port), *known))
    instance = next(each for each in cluster.instances if each.id == name)
    return Command({}, (*words, "engine", str(instance.port), *how))


def cluster_of(ports: list[int]) -> Cluster:
    """One prefill and one decode server on these ports: the proxy's, two API ports, two side channels."""
    roles = (Role.PREFILL, Role.DECODE)
    instances = tuple(
        Instance(id=f"{role.letter}0", role=role, host="127.0.0.1", port=api, side_channel_port=side)
        for role, api, side in zip(roles, ports[1:3], ports[3:5], strict=True)
    )
    return Cluster(model="m", proxy_port=ports[0], instances=instances)


def operator_of(
    supervisor: Supervisor,
    cluster: Cluster,
    name: str,
    environ: dict[str, str],
    how: tuple[str, ...] = (),
    **keeping: Any,
) -> Operator:
    me = ProcessRecord(name="supervisor", pid=os.getpid(), created=created_at(os.getpid()), log=supervisor.logs)
    record = ClusterRecord(
        name=name,
        run=supervisor.run,
        supervisor=me,
        control=supervisor.scratch / SOCKET,
        scratch=supervisor.scratch,
        logs=supervisor.logs,
        asked=cluster,
        cluster=cluster,
        model_folder="/m",
        served_model="m",
    )
    client = ProxyClient.of(cluster, {})
    command = partial(command_of, how=how)
    return Operator(supervisor, record, command, client, keeping=Keeping(**keeping), environ=environ)


async def up(name: str, folder: str, ports: list[int], how: list[str]) -> None:
    """What `baton up` does, with these processes in place of engines; says ``up`` when all answer."""
    me = asyncio.current_task()
    assert me is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    environ = {"XDG_STATE_HOME": folder}
    with holding(name, environ):
        await _up(name, folder, ports, environ, how)


async def _up(name: str, folder: str, ports: list[int], environ: dict[str, str], how: list[str]) -> None:
    async with Supervisor(Path(folder) / "logs", f"run-{folder}") as supervisor:
        operator = operator_of(supervisor, cluster_of(ports), name, environ, tuple(how))
        try:
            await operator.begin()
            await supervisor.until_ready(60)
            operator.write()
            async with listening(operator, operator.record.control):
                operator.opens()
                print("up", flush=True)
                await operator.keep()
        finally:
            await asyncio.shield(operator.close())


if __name__ == "__main__":
    kind, first, *rest = sys.argv[1:]
    if kind == "engine":
        engine(int(first), rest)
    elif kind == "proxy":
        proxy(int(first), rest)
    else:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(up(first, rest[0], [int(port) for port in rest[1].split(",")], rest[2:]))
