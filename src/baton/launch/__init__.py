"""The launcher's room: ports, devices, commands, checks before the start, and the watch afterwards."""

from baton.launch.cluster_file import ClusterFile, schema
from baton.launch.cluster_run import cluster_commands, default_logs, install_for, start_cluster
from baton.launch.commands import (
    Command,
    EngineRequest,
    bidirectional_asked,
    dashed,
    engine_command,
    flag_value,
    proxy_command,
)
from baton.launch.devices import EngineInstall, available_cpus, available_numa, installed_engine, share_cpus
from baton.launch.errors import LaunchError
from baton.launch.examination import Examination, examine
from baton.launch.file_plan import Flags, RoleFlags, file_endpoints, plan_file, proxy_address
from baton.launch.file_reader import ClusterFileError, read_cluster_file
from baton.launch.file_template import Wish, addresses, written
from baton.launch.findings import Finding, Verdict, exit_code
from baton.launch.plan import PlanRequest, plan
from baton.launch.preflight import available_bytes, check_cluster, check_engine, check_plan, estimates
from baton.launch.probe import url_of
from baton.launch.problem import Problem
from baton.launch.report import Process, as_shell, as_text, as_value, dumps, processes
from baton.launch.supervisor import ChildDied, StartTimeout, Supervisor
from baton.launch.tryout import TryoutFailed, ask

__all__ = [
    "ChildDied",
    "ClusterFile",
    "ClusterFileError",
    "Command",
    "EngineInstall",
    "EngineRequest",
    "Examination",
    "Finding",
    "Flags",
    "LaunchError",
    "PlanRequest",
    "Problem",
    "Process",
    "RoleFlags",
    "StartTimeout",
    "Supervisor",
    "TryoutFailed",
    "Verdict",
    "Wish",
    "addresses",
    "as_shell",
    "as_text",
    "as_value",
    "ask",
    "available_bytes",
    "available_cpus",
    "available_numa",
    "bidirectional_asked",
    "check_cluster",
    "check_engine",
    "check_plan",
    "cluster_commands",
    "dashed",
    "default_logs",
    "dumps",
    "engine_command",
    "estimates",
    "examine",
    "exit_code",
    "file_endpoints",
    "flag_value",
    "install_for",
    "installed_engine",
    "plan",
    "plan_file",
    "processes",
    "proxy_address",
    "proxy_command",
    "read_cluster_file",
    "schema",
    "share_cpus",
    "start_cluster",
    "url_of",
    "written",
]
