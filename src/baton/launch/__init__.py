"""The launcher's room: ports, devices, commands, checks before the start, and the watch afterwards."""

from baton.launch.cluster_file import (
    ClusterFile,
    schema,
)
from baton.launch.cluster_run import (
    PROXY,
    cluster_commands,
    command_of,
    here,
    install_for,
    new_logs,
    unknown_here,
)
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
from baton.launch.control import (
    SOCKET,
    ControlFailed,
    ask_change,
    listening,
)
from baton.launch.devices import (
    EngineInstall,
    available_cpus,
    available_numa,
    installed_engine,
    share_cpus,
)
from baton.launch.down import (
    end_left,
    take_down,
)
from baton.launch.errors import (
    LaunchError,
)
from baton.launch.examination import (
    Examination,
    examine,
)
from baton.launch.file_plan import (
    Flags,
    RoleFlags,
    file_endpoints,
    plan_file,
    proxy_address,
)
from baton.launch.file_reader import (
    ClusterFileError,
    read_cluster_file,
)
from baton.launch.file_template import (
    Wish,
    addresses,
    written,
)
from baton.launch.findings import (
    Finding,
    Verdict,
    exit_code,
)
from baton.launch.machine import (
    addresses_here,
)
from baton.launch.observe import (
    observe,
    observe_proxy,
)
from baton.launch.operate import (
    Keeping,
    Operator,
)
from baton.launch.plan import (
    PlanRequest,
    plan,
)
from baton.launch.ports import (
    node_at,
)
from baton.launch.preflight import (
    available_bytes,
    check_cluster,
    check_engine,
    check_memory,
    check_plan,
    estimates,
)
from baton.launch.probe import (
    url_of,
)
from baton.launch.problem import (
    Problem,
)
from baton.launch.proxy_client import (
    ProxyClient,
    ProxyRefused,
)
from baton.launch.record import (
    DEFAULT_NAME,
    ClusterRecord,
    ProcessRecord,
    check_name,
    created_at,
    holding,
    known_names,
    load,
)
from baton.launch.report import (
    Process,
    as_shell,
    as_text,
    as_value,
    dumps,
    processes,
)
from baton.launch.supervisor import (
    ChildDied,
    StartTimeout,
    Supervisor,
)
from baton.launch.tryout import (
    TryoutFailed,
    ask,
)

__all__ = [
    "DEFAULT_NAME",
    "PROXY",
    "SOCKET",
    "STATIC_SHAPES_FLAG",
    "ChildDied",
    "ClusterFile",
    "ClusterFileError",
    "ClusterRecord",
    "Command",
    "ControlFailed",
    "EngineInstall",
    "EngineRequest",
    "Examination",
    "Finding",
    "Flags",
    "Keeping",
    "LaunchError",
    "Operator",
    "PlanRequest",
    "Problem",
    "Process",
    "ProcessRecord",
    "ProxyClient",
    "ProxyRefused",
    "RoleFlags",
    "StartTimeout",
    "Supervisor",
    "TryoutFailed",
    "Verdict",
    "Wish",
    "addresses",
    "addresses_here",
    "as_shell",
    "as_text",
    "as_value",
    "ask",
    "ask_change",
    "available_bytes",
    "available_cpus",
    "available_numa",
    "bidirectional_asked",
    "check_cluster",
    "check_engine",
    "check_memory",
    "check_name",
    "check_plan",
    "cluster_commands",
    "command_of",
    "created_at",
    "dashed",
    "dumps",
    "end_left",
    "engine_command",
    "estimates",
    "examine",
    "exit_code",
    "file_endpoints",
    "flag_value",
    "here",
    "holding",
    "install_for",
    "installed_engine",
    "known_names",
    "listening",
    "load",
    "new_logs",
    "node_at",
    "observe",
    "observe_proxy",
    "plan",
    "plan_file",
    "processes",
    "proxy_address",
    "proxy_command",
    "read_cluster_file",
    "schema",
    "share_cpus",
    "take_down",
    "unknown_here",
    "url_of",
    "written",
]
