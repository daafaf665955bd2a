"""The launcher's room: ports, devices, commands, checks before the start, and the watch afterwards."""

from baton.launch.cluster_file import ClusterFileError, read_cluster_file
from baton.launch.cluster_run import cluster_commands, default_logs, start_cluster
from baton.launch.commands import (
    STATIC_SHAPES_FLAG,
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
from baton.launch.file_plan import Flags, RoleFlags, file_endpoints, plan_file
from baton.launch.plan import PlanRequest, plan
from baton.launch.preflight import check_cluster, check_engine
from baton.launch.probe import url_of
from baton.launch.problem import Problem
from baton.launch.supervisor import ChildDied, StartTimeout, Supervisor
from baton.launch.tryout import TryoutFailed, ask

__all__ = [
    "STATIC_SHAPES_FLAG",
    "ChildDied",
    "ClusterFileError",
    "Command",
    "EngineInstall",
    "EngineRequest",
    "Flags",
    "LaunchError",
    "PlanRequest",
    "Problem",
    "RoleFlags",
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
    "file_endpoints",
    "flag_value",
    "installed_engine",
    "plan",
    "plan_file",
    "proxy_command",
    "read_cluster_file",
    "share_cpus",
    "start_cluster",
    "url_of",
]
