"""The launcher's room: ports, devices, commands, checks before the start, and the watch afterwards."""

from baton.launch.cluster_file import ClusterFileError, read_cluster_file
from baton.launch.cluster_run import PROXY, cluster_commands, default_logs
from baton.launch.commands import (
    Command,
    EngineRequest,
    bidirectional_asked,
    dashed,
    engine_command,
    flag_value,
    proxy_command,
)
from baton.launch.control import SOCKET, ControlFailed, ask_change, listening
from baton.launch.devices import EngineInstall, available_cpus, installed_engine, share_cpus
from baton.launch.down import take_down
from baton.launch.errors import LaunchError
from baton.launch.file_plan import Flags, RoleFlags, file_endpoints, plan_file
from baton.launch.observe import observe, observe_proxy
from baton.launch.operate import Keeping, Operator
from baton.launch.plan import PlanRequest, plan
from baton.launch.preflight import check_cluster, check_engine
from baton.launch.probe import url_of
from baton.launch.problem import Problem
from baton.launch.proxy_client import ProxyClient, ProxyRefused
from baton.launch.record import (
    DEFAULT_NAME,
    ClusterRecord,
    ProcessRecord,
    check_name,
    created_at,
    forget,
    known_names,
    load,
)
from baton.launch.supervisor import ChildDied, StartTimeout, Supervisor
from baton.launch.tryout import TryoutFailed, ask

__all__ = [
    "DEFAULT_NAME",
    "PROXY",
    "SOCKET",
    "ChildDied",
    "ClusterFileError",
    "ClusterRecord",
    "Command",
    "ControlFailed",
    "EngineInstall",
    "EngineRequest",
    "Flags",
    "Keeping",
    "LaunchError",
    "Operator",
    "PlanRequest",
    "Problem",
    "ProcessRecord",
    "ProxyClient",
    "ProxyRefused",
    "RoleFlags",
    "StartTimeout",
    "Supervisor",
    "TryoutFailed",
    "ask",
    "ask_change",
    "available_cpus",
    "bidirectional_asked",
    "check_cluster",
    "check_engine",
    "check_name",
    "cluster_commands",
    "created_at",
    "dashed",
    "default_logs",
    "engine_command",
    "file_endpoints",
    "flag_value",
    "forget",
    "installed_engine",
    "known_names",
    "listening",
    "load",
    "observe",
    "observe_proxy",
    "plan",
    "plan_file",
    "proxy_command",
    "read_cluster_file",
    "share_cpus",
    "take_down",
    "url_of",
]
