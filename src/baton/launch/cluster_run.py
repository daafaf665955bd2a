"""A planned cluster's commands, and starting all of them at once."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import orjson

from baton.cluster import Cluster, Instance, Role
from baton.launch.commands import Command, EngineRequest, engine_command, proxy_command
from baton.launch.devices import VISIBLE, EngineInstall, available_cpus
from baton.launch.probe import answers
from baton.launch.record import state_folder
from baton.launch.supervisor import Probe
from baton.models import ResolvedModel

PROXY = "proxy"
WAITING = "waiting for the engines"


def cluster_commands(
    cluster: Cluster, model: ResolvedModel, install: EngineInstall, environ: Mapping[str, str] = os.environ
) -> dict[str, Command]:
    """The command of every process of *cluster*, by name: each instance, then the proxy.

    What stands in *environ* keeps our defaults away, where all runs on this host.
    """
    install = install_for(cluster, install)
    environ, cores = _of_host(cluster, environ)
    commands = {
        instance.id: _engine_command(cluster, instance, model, install, (environ, cores))
        for instance in cluster.instances
    }
    return commands | {PROXY: proxy_command(cluster)}


def command_of(
    cluster: Cluster, name: str, model: ResolvedModel, install: EngineInstall, environ: Mapping[str, str] = os.environ
) -> Command:
    """The same for one of them."""
    if name == PROXY:
        return proxy_command(cluster)
    instance = next(each for each in cluster.instances if each.id == name)
    return _engine_command(cluster, instance, model, install_for(cluster, install), _of_host(cluster, environ))


def here(cluster: Cluster, node: str) -> tuple[str, ...]:
    """The processes of *cluster* that run on the host *node*: instances, then the proxy."""
    engines = tuple(instance.id for instance in cluster.on(node))
    return (*engines, PROXY) if node == cluster.proxy_node else engines


def unknown_here(cluster: Cluster, node: str, name: str) -> str:
    """What there is to say to who asks on the host *node* for a process that does not run there."""
    elsewhere = {each.id: each.node for each in cluster.instances} | {PROXY: cluster.proxy_node}
    if name in elsewhere and elsewhere[name] != node:
        return f"{name} runs on {elsewhere[name]}, and this is {node}: give the command there"
    return f"there is no instance {name!r}: there are {', '.join(here(cluster, node))}"


def probe_of(cluster: Cluster, name: str) -> Probe:
    """What asks whether a process of *cluster* is ready."""
    if name == PROXY:
        # Its health is good when a server of each role is usable; here all are wanted, and every pair warmed up.
        return answers(cluster.proxy_host, cluster.proxy_port, "/health", all_are_usable)
    instance = next(each for each in cluster.instances if each.id == name)
    return answers(instance.host, instance.port, "/health")


def install_for(cluster: Cluster, install: EngineInstall) -> EngineInstall:
    """The vLLM that the cluster's engines run on: what is installed here, on the device that was asked for."""
    return install if cluster.device is None else replace(install, device=str(cluster.device))


def all_are_usable(health: bytes) -> bool:
    """Whether a proxy's health says that it knows no engine that is out, and no pair that was never tried."""
    value = orjson.loads(health)
    warm_up = value.get("warm_up", {"tried": 0, "pairs": 0})
    return warm_up["tried"] == warm_up["pairs"] and all(value[role]["usable"] == value[role]["known"] for role in Role)


def new_logs(environ: Mapping[str, str] = os.environ) -> Path:
    """Make a folder for the logs of one run and no other: $XDG_STATE_HOME/baton/<time>, else under ~/.local/state.

    Raises:
        OSError: it cannot be made.
    """
    first = state_folder(environ) / time.strftime("%Y%m%d-%H%M%S")
    first.parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


def _of_host(cluster: Cluster, environ: Mapping[str, str]) -> tuple[Mapping[str, str], tuple[int, ...]]:
    """Environment and cores that commands start from: this host's where all runs on one; of others nobody knows."""
    return (environ, available_cpus()) if len(cluster.nodes) == 1 else ({}, ())


def _engine_command(
    cluster: Cluster,
    instance: Instance,
    model: ResolvedModel,
    install: EngineInstall,
    of_host: tuple[Mapping[str, str], tuple[int, ...]],
) -> Command:
    environ, cores = of_host
    command = engine_command(_request(cluster, instance, cores), model, install, {**environ, **instance.environ})
    # Who names devices himself, by ids perhaps, is left alone.
    ours = {
        name: value for name, value in command.environ.items() if name not in VISIBLE or name not in instance.environ
    }
    return Command({**instance.environ, **ours}, command.argv)


def _request(cluster: Cluster, instance: Instance, cores: tuple[int, ...]) -> EngineRequest:
    return EngineRequest(
        role=instance.role,
        vllm_args=("--host", instance.host, "--port", str(instance.port), *instance.engine_args),
        side_channel_host=instance.side_channel_host,
        side_channel_port=instance.side_channel_port,
        cpus=instance.cpus,
        devices=instance.devices,
        available_cpus=cores,
        transfer_mode=cluster.transfer_mode,
        bidirectional=cluster.bidirectional,
        pull_threshold=cluster.pull_threshold,
        transport=cluster.transport,
    )
