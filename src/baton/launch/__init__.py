"""The launcher's room: ports, devices, commands, checks before the start, and the watch afterwards."""

from baton.launch.cluster_run import cluster_commands, default_logs, start_cluster
from baton.launch.commands import (
    Command,
    EngineRequest,
    bidirectional_asked,
    dashed,
    engine_command,
    flag_value,
    proxy_command,
)
from baton.launch.devices import EngineInstall, available_cpus, installed_engine, share_cpus
from baton.launch.errors import LaunchError
from baton.launch.plan import PlanRequest, plan
from baton.launch.preflight import Problem, check_cluster, check_engine
from baton.launch.probe import url_of
from baton.launch.supervisor import ChildDied, StartTimeout, Supervisor
from baton.launch.tryout import TryoutFailed, ask

__all__ = [
    "ChildDied",
    "Command",
    "EngineInstall",
    "EngineRequest",
    "LaunchError",
    "PlanRequest",
    "Problem",
    "StartTimeout",
    "Supervisor",
    "TryoutFailed",
    "ask",
    "available_cpus",
    "bidirectional_asked",
    "check_cluster",
    "check_engine",
    "cluster_commands",
    "dashed",
    "default_logs",
    "engine_command",
    "flag_value",
    "installed_engine",
    "plan",
    "proxy_command",
    "share_cpus",
    "start_cluster",
    "url_of",
]
