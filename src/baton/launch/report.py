"""A planned cluster as values, as text and as scripts: every process with its ports, devices and command. Pure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from baton.cluster import THIS_HOST, Cluster, Instance, Role
from baton.engine import format_cpus
from baton.launch.cluster_run import PROXY
from baton.launch.commands import Command
from baton.launch.ports import Claim, claims_of
from baton.launch.preflight import Estimate
from baton.launch.shapes import ranks_of
from baton.numbers import decimal

PYTHON = '"$PYTHON"'


@dataclass(frozen=True)
class Process:
    """One process of a plan.

    Attributes:
        id: ``P0``, ``D0``, ``proxy``.
        instance: None for the proxy.
        ports: what it listens on.
        command: its environment and command.
        memory: what an engine will take; None where that is not known.
    """

    id: str
    instance: Instance | None
    ports: tuple[Claim, ...]
    command: Command
    memory: Estimate | None

    def value(self) -> dict[str, Any]:
        """It as JSON has it."""
        found: dict[str, Any] = {"id": self.id, "role": "proxy"}
        if self.instance is not None:
            threads = self.command.environ.get("OMP_NUM_THREADS")
            found |= {
                "role": str(self.instance.role),
                "ranks": ranks_of(self.instance.engine_args).workers,
                "devices": list(self.instance.devices),
                "cpus": list(self.instance.cpus),
                "threads_per_worker": decimal(threads),
                "memory_bytes": None if self.memory is None else {**vars(self.memory), "total": self.memory.total},
            }
        ports = [{"port": each.port, "host": each.host, "what": each.what} for each in self.ports]
        return {**found, "ports": ports, "environ": dict(self.command.environ), "argv": list(self.command.argv)}

    def line(self) -> str:
        """It in one line for people."""
        said = [ports_of(self.ports)]
        if self.instance is not None:
            if self.instance.devices:
                said.append(f"devices {format_cpus(self.instance.devices)}")
            if self.instance.cpus:
                said.append(f"cores {format_cpus(self.instance.cpus)}")
            if "OMP_NUM_THREADS" in self.command.environ:
                said.append(f"threads {self.command.environ['OMP_NUM_THREADS']}")
        if self.memory is not None:
            parts = ", ".join(f"{name.replace('_', ' ')} {size / 1e9:.1f}" for name, size in vars(self.memory).items())
            said.append(f"memory about {self.memory.total / 1e9:.1f} GB ({parts})")
        return f"{self.id:6} {'' if self.instance is None else self.instance.role:8} {'; '.join(said)}"


def address_of(found: Sequence[Process]) -> str:
    """Where the processes of one host are reached."""
    return found[0].ports[0].host


def ports_of(claims: Sequence[Claim]) -> str:
    """Ports and what they are for; those of an engine's ranks, which follow each other, as a range."""
    ranks = [each.port for each in claims if each.what.startswith("side channel of rank")]
    said = [f"{each.what} {each.port}" for each in claims if each.port not in ranks]
    if ranks:
        said.insert(
            1, f"side channels {min(ranks)}-{max(ranks)}, one a rank" if len(ranks) > 1 else f"side channel {ranks[0]}"
        )
    return ", ".join(said)


def processes(
    cluster: Cluster, commands: Mapping[str, Command], memory: Mapping[str, Estimate]
) -> dict[str, list[Process]]:
    """Every process, by the host it runs on, engines in their order and the proxy after them."""
    ports: dict[str, list[Claim]] = {}
    for claim in claims_of(cluster):
        ports.setdefault(claim.process, []).append(claim)
    made: dict[str, list[Process]] = {}
    for instance in cluster.instances:
        name = instance.id
        process = Process(name, instance, tuple(ports[name]), commands[name], memory.get(name))
        made.setdefault(instance.node, []).append(process)
    proxy = Process(PROXY, None, tuple(ports[PROXY]), commands[PROXY], None)
    made.setdefault(cluster.proxy_node, []).append(proxy)
    return made


def as_value(cluster: Cluster, hosts: Mapping[str, Sequence[Process]], problems: Iterable[str]) -> dict[str, Any]:
    """The plan for programs."""
    return {
        "model": cluster.model,
        "device": cluster.device,
        "transfer_mode": str(cluster.transfer_mode),
        "hosts": [
            {"name": name, "address": address_of(found), "processes": [each.value() for each in found]}
            for name, found in hosts.items()
        ],
        "problems": list(problems),
    }


def as_text(cluster: Cluster, hosts: Mapping[str, Sequence[Process]], free: int | None) -> str:
    """The plan for people: what goes where, then every command.

    Args:
        free: bytes of memory on this host; None where the plan is for others.
    """
    counts = " and ".join(f"{len(cluster.of_role(role))} {role}" for role in Role)
    on = f"on {len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    lines = [f"{cluster.model}: {counts} servers {on}, {cluster.transfer_mode} mode"]
    for name, found in hosts.items():
        title = name if name in (THIS_HOST, address_of(found)) else f"{name} ({address_of(found)})"
        lines += ["", title, *(f"  {each.line()}" for each in found)]
        total = sum(each.memory.total for each in found if each.memory is not None)
        if total and free is not None:
            lines.append(f"  in all about {total / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB are free")
    commands = [f"# {each.id} on {name}\n{each.command.shell()}" for name, found in hosts.items() for each in found]
    return "\n".join(lines) + "\n\n" + "\n\n".join(commands)


def as_shell(node: str, found: Sequence[Process]) -> str:
    """A script that runs one host's share, with logs beside it, until Ctrl-C."""
    parts = [
        "#!/bin/sh",
        f"# {', '.join(each.id for each in found)} on {node}. Logs go to the folder it is run in; Ctrl-C stops all.",
        "set -eu",
        f"PYTHON=${{PYTHON:-{shlex.quote(sys.executable)}}}",
        "pids= stop=",
        "trap 'stop=1; kill $pids 2>/dev/null || true' INT TERM",
    ]
    for each in found:
        shell = each.command.shell().replace(shlex.quote(sys.executable), PYTHON, 1)
        parts += ["", f"# {each.id}: {ports_of(each.ports)}", f"{shell} > {each.id}.log 2>&1 &", 'pids="$pids $!"']
    # A signal may have come before the last pid was known; one that comes later cuts the first wait short.
    parts += ["", '[ -z "$stop" ] || kill $pids 2>/dev/null || true', "wait || wait"]
    return "\n".join(parts) + "\n"


def dumps(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
