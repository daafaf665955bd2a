"""One whole visit of the doctor: this host first, then whatever runs."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from baton.cluster import Cluster, TransferBackend
from baton.launch.cluster_run import PROXY, install_for
from baton.launch.commands import Command, json_flag
from baton.launch.devices import EngineInstall, nixl_version
from baton.launch.doctor import Settings, check_cluster_running
from baton.launch.findings import Finding, bad, ok, skipped
from baton.launch.machine import (
    HERE,
    Run,
    check_efa,
    check_limits,
    check_memory_of,
    check_nixl,
    check_packages,
    check_ports_of,
    run_child,
)
from baton.launch.ports import claims_of
from baton.launch.preflight import check_plan
from baton.launch.shapes import ranks_of


@dataclass(frozen=True)
class Examination:
    """What to look at.

    Attributes:
        cluster: as it is planned.
        node: which of its hosts this is; None for none of them.
        install: the vLLM that is here.
        commands: of its engines, by name; empty when its model is not here.
        local_model: whether the model's files are on this disk.
        hand_offs, hand_off_seconds, key: see :class:`baton.launch.doctor.Settings`.
        run: runs a program; for tests.
    """

    cluster: Cluster
    node: str | None
    install: EngineInstall
    commands: Mapping[str, Command]
    local_model: bool = False
    hand_offs: bool = True
    hand_off_seconds: float = 60.0
    key: str | None = None
    run: Run = run_child


async def examine(asked: Examination) -> list[Finding]:
    """Every finding: of this host, of the plan, of what runs."""
    node = asked.node if len(asked.cluster.nodes) > 1 else None
    settings = Settings(asked.hand_off_seconds, hand_offs=asked.hand_offs, key=asked.key, node=node)
    machine = asyncio.to_thread(look_at_machine, asked)
    running, (findings, up) = await asyncio.gather(machine, check_cluster_running(asked.cluster, settings))
    return [*running, *check_fit(asked), *look_at_room(asked, up), *findings]


def look_at_machine(asked: Examination) -> list[Finding]:
    """What has to do with no process of the cluster."""
    if asked.node is None:
        return [skipped("packages", HERE, "it is no host of the cluster, or --host does not say which")]
    backends = backends_of(asked.cluster, asked.commands)
    findings = list(check_packages(asked.cluster, asked.install, nixl_version()))
    if asked.install.has_nixl:
        findings += check_nixl(backends, asked.run)
    return [*findings, *check_efa(backends, asked.run)]


def check_fit(asked: Examination) -> list[Finding]:
    """The engines fit together, as `baton plan` checks it."""
    if not asked.commands:
        return [skipped("plan", "the cluster", f"there is no model {asked.cluster.model!r} here to plan with")]
    engines = [asked.commands[each.id] for each in asked.cluster.instances]
    found = check_plan(asked.cluster, engines, asked.install, local_model=asked.local_model)
    if not found:
        return [ok("plan", "the cluster", "its engines fit together")]
    return [bad("plan", "the cluster", *split_remedy(problem.what)) for problem in found]


def split_remedy(what: str) -> tuple[str, str]:
    """A problem's line as what is wrong and what to do: they are joined by the last semicolon or colon."""
    for joint in ("; ", ": "):
        head, found, tail = what.rpartition(joint)
        if found:
            return head, tail
    return what, ""


def look_at_room(asked: Examination, up: set[str]) -> list[Finding]:
    """Ports, memory and limits for what is planned here and not up."""
    if asked.node is None:
        return []
    mine = [each for each in asked.cluster.on(asked.node) if each.id not in up]
    names = {each.id for each in mine} | ({PROXY} if asked.cluster.proxy_node == asked.node else set()) - up
    claims = [each for each in claims_of(asked.cluster) if each.process in names]
    commands = {each.id: asked.commands[each.id] for each in mine if each.id in asked.commands}
    on_cpu = install_for(asked.cluster, asked.install).device == "cpu"
    workers = sum(ranks_of(each.engine_args).workers for each in mine)
    return [
        *check_ports_of(claims),
        *check_memory_of(commands, known=on_cpu and asked.local_model),
        *check_limits(workers),
    ]


def backends_of(cluster: Cluster, commands: Mapping[str, Command]) -> list[str]:
    """NIXL's backends that engines are told to use; UCX when nothing is said."""
    found: dict[str, None] = {}
    for instance in cluster.instances:
        words = commands[instance.id].argv if instance.id in commands else instance.engine_args
        extra = json_flag(words, "--kv-transfer-config").get("kv_connector_extra_config", {})
        default = [str(cluster.transport.backend or TransferBackend.UCX)]
        found |= dict.fromkeys(extra.get("backends", default) if isinstance(extra, dict) else default)
    return list(found)
