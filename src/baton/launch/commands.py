"""The exact environment and command of every process that Baton starts.

Pure functions: from what was asked for to what would run. `--dry-run` prints what they give.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cluster import Cluster, Role, TransferMode, Transport
from baton.engine import (
    CPUS,
    ENGINE_SWITCH,
    NIXL_NAP_US,
    STATIC_SHAPES,
    PushBounds,
    component_sizes,
    format_cpus,
    own_config,
    static_shapes_asked_for,
)
from baton.launch import transports
from baton.launch.devices import EngineInstall, neuron_transfer, visible_devices
from baton.launch.errors import LaunchError
from baton.launch.model_config import has_state, read_config
from baton.launch.shapes import check_ranks, ranks_of
from baton.models import ResolvedModel
from baton.numbers import decimal, human_size

DEFAULT_PORTS = {Role.PREFILL: 8100, Role.DECODE: 8200}
DEFAULT_SIDE_CHANNEL_PORTS = {Role.PREFILL: 5559, Role.DECODE: 5659}
DEFAULT_KV_CACHE_BYTES = 1 << 30
BATON_CONNECTOR = "baton.engine.connector"
STATIC_SHAPES_FLAG = "--static-shapes"
"""Stands among the engine's flags, so that it can differ from engine to engine; vLLM never sees it."""
SIDE_CHANNEL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""GiB of KV cache of a worker on CPU; it wins over the flag (vllm 0.32, platforms/cpu.py)."""
STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"


@dataclass(frozen=True)
class Command:
    """What starts one process.

    Attributes:
        environ: variables set on top of the caller's environment.
        argv: the program and its arguments.
    """

    environ: Mapping[str, str]
    argv: tuple[str, ...]

    def shell(self) -> str:
        """The same as text for a shell, a variable or a flag with its values a line."""
        lines = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        words: list[str] = []
        for word in self.argv:
            if word.startswith("--") or not words:
                words.append(shlex.quote(word))
            else:
                words[-1] += f" {shlex.quote(word)}"
        return " \\\n    ".join([*lines, *words])


@dataclass(frozen=True)
class EngineRequest:
    """What was asked of one engine, before defaults.

    Attributes:
        role: its phase.
        vllm_args: flags that go to `vllm serve` as they are.
        side_channel_host: None leaves it to the environment, then to 127.0.0.1.
        side_channel_port: None leaves it to --additional-config, the environment, then the role's default.
        cpus: the cores it may use; empty means all that the caller may use.
        devices: the accelerators that it may see; empty means all.
        available_cpus: all of those; empty when they are not known, on another host.
        nixl_nap_us: None leaves the plugin's default.
        transfer_mode: how the KV cache travels.
        bidirectional: whether decode servers keep a turn's KV cache for the next turn's prefill server to pull.
        pull_threshold: tokens below which it computes them instead; None leaves vLLM's default (64).
        transport: what it travels over.
    """

    role: Role
    vllm_args: tuple[str, ...] = ()
    side_channel_host: str | None = None
    side_channel_port: int | None = None
    cpus: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()
    available_cpus: tuple[int, ...] = (0,)
    nixl_nap_us: int | None = None
    transfer_mode: TransferMode = TransferMode.READ
    bidirectional: bool = False
    pull_threshold: int | None = None
    transport: Transport = field(default_factory=Transport)


def engine_command(
    request: EngineRequest, model: ResolvedModel, install: EngineInstall, environ: Mapping[str, str]
) -> Command:
    """The command of one engine.

    Args:
        request: what was asked for.
        model: what it serves.
        install: the vLLM it runs on.
        environ: the caller's environment; what stands there already wins over our defaults.

    Raises:
        LaunchError: flags contradict each other, the role or the device.
    """
    args = request.vllm_args
    check_ranks(args)
    transfer = _transfer_config(request, install)
    if install.device == "neuron":
        transfer = neuron_transfer(transfer, request.transport)
        args = with_side_channel_port(args, side_channel(request, environ)[1])
    extra = transports.extra_config(request.transport, transfer.get("kv_connector_extra_config", {}), install.device)
    if extra:
        transfer["kv_connector_extra_config"] = extra
    port = _int_flag(args, "--port")
    if port is not None and not 0 < port < 65536:
        raise LaunchError(f"--port {port} is not a port number (1 to 65535)")
    _check_kv_cache(args, environ)
    flags: list[str] = []
    for name, value in _defaults(request, model, install, environ):
        if flag_value(args, name) is None and not _negated(args, name):
            flags += [name] if value is None else [name, value]
    return Command(
        environ=_environ(request, model, install, environ)
        | transports.environ(request.transport, extra, install.device, environ),
        argv=(
            sys.executable,
            "-m",
            "baton.engine.serve",
            model.target,
            *(("--port", str(DEFAULT_PORTS[request.role])) if port is None else ()),
            *flags,
            *(word for word in without_flag(args, "--kv-transfer-config") if word != STATIC_SHAPES_FLAG),
            "--kv-transfer-config",
            json.dumps(transfer),
        ),
    )


def proxy_command(cluster: Cluster) -> Command:
    """The command of the proxy that fronts *cluster*."""
    prefill, decode = cluster.of_role(Role.PREFILL), cluster.of_role(Role.DECODE)
    return Command(
        environ={},
        argv=(
            sys.executable,
            "-m",
            "baton.cli",
            "proxy",
            "--host",
            cluster.proxy_host,
            "--port",
            str(cluster.proxy_port),
            "--prefiller-hosts",
            *(instance.host for instance in prefill),
            "--prefiller-ports",
            *(str(instance.port) for instance in prefill),
            "--decoder-hosts",
            *(instance.host for instance in decode),
            "--decoder-ports",
            *(str(instance.port) for instance in decode),
            *(("--turns",) if cluster.bidirectional else ()),
            *cluster.proxy_flags,
        ),
    )


def side_channel(request: EngineRequest, environ: Mapping[str, str]) -> tuple[str, int]:
    """Host and first port of NIXL's metadata exchange: flag, then config, then environment, then default.

    Raises:
        LaunchError: two of them name different ports, or one is no port.
    """
    host = request.side_channel_host or environ.get(SIDE_CHANNEL_HOST) or "127.0.0.1"
    in_config = json_flag(request.vllm_args, "--additional-config").get("nixl_side_channel_port")
    if in_config is not None and request.side_channel_port not in (None, in_config):
        raise LaunchError(
            f"--side-channel-port {request.side_channel_port} and nixl_side_channel_port {in_config!r} in "
            "--additional-config differ: give one of them"
        )
    given: Any = request.side_channel_port or in_config or environ.get(SIDE_CHANNEL_PORT)
    if given is None or given == "":
        return host, DEFAULT_SIDE_CHANNEL_PORTS[request.role]
    port = decimal(str(given))
    if port is None or not 0 < port < 65536:
        raise LaunchError(f"the side channel port {given!r} is not a port number (1 to 65535)")
    return host, port


def flag_value(args: Sequence[str], name: str) -> str | None:
    """The last value of flag *name* in *args*; an empty text for a flag without value; None when absent."""
    found: str | None = None
    for index, word in enumerate(args):
        if word == name:
            following = args[index + 1] if index + 1 < len(args) else ""
            found = "" if following.startswith("--") else following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found


def without_flag(args: Sequence[str], name: str) -> tuple[str, ...]:
    """*args* less every occurrence of flag *name* and its value."""
    kept: list[str] = []
    skip = False
    for word in args:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return tuple(kept)


def with_side_channel_port(args: Sequence[str], port: int) -> tuple[str, ...]:
    """*args* with the side channel's port in --additional-config, where vLLM's plugin for Neuron reads it."""
    config = {"nixl_side_channel_port": port, **json_flag(args, "--additional-config")}
    if flag_value(args, "--additional-config") is None:
        return (*args, "--additional-config", json.dumps(config))
    at = max(index for index, word in enumerate(args) if word.partition("=")[0] == "--additional-config")
    end = at + (1 if "=" in args[at] else 2)
    rest = without_flag(args[:at], "--additional-config")
    return (*rest, "--additional-config", json.dumps(config), *args[end:])


def dashed(args: Sequence[str]) -> tuple[str, ...]:
    """*args* with every flag spelled with dashes: vLLM takes ``--max_num_seqs`` as well."""
    return tuple(
        word.partition("=")[0].replace("_", "-") + "".join(word.partition("=")[1:]) if word.startswith("--") else word
        for word in args
    )


def _negated(args: Sequence[str], name: str) -> bool:
    return f"--no-{name.removeprefix('--')}" in args


def _int_flag(args: Sequence[str], name: str) -> int | None:
    text = flag_value(args, name)
    if text is None:
        return None
    value = decimal(text)
    if value is None:
        raise LaunchError(f"{name} {text!r} is not a whole number")
    return value


def _check_kv_cache(args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Sizes that are not understood cannot be held against the memory that is free."""
    given = flag_value(args, "--kv-cache-memory-bytes")
    if given is not None and human_size(given) is None:
        raise LaunchError(f"--kv-cache-memory-bytes {given!r} is not a number of bytes, such as 1073741824, 1G or 1.5g")
    space = environ.get(KV_SPACE)
    if space and decimal(space) is None:
        raise LaunchError(f"{KV_SPACE}={space!r} is not a whole number of GiB, such as 4")


def json_flag(args: Sequence[str], name: str) -> dict[str, Any]:
    """The JSON object that flag *name* holds; empty when absent.

    Raises:
        LaunchError: it holds something else.
    """
    text = flag_value(args, name)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise LaunchError(f"{name} {text!r} is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{name} {text[:80]!r}...: a number in it is too long, or it is nested too deep") from error
    if not isinstance(value, dict):
        raise LaunchError(f"{name} {text!r} is not a JSON object")
    return value


def _transfer_config(request: EngineRequest, install: EngineInstall) -> dict[str, Any]:
    """The engine's kv_transfer_config: ours, with what the user's own adds."""
    if any(word.startswith("--kv-transfer-config.") for word in request.vllm_args):
        raise LaunchError("give --kv-transfer-config as one JSON object: Baton adds the role to it")
    asked = given = json_flag(request.vllm_args, "--kv-transfer-config")
    role = given.get("kv_role", request.role.kv_role)
    if role not in (request.role.kv_role, "kv_both"):
        raise LaunchError(
            f"--role {request.role} means kv_role {request.role.kv_role!r}, but --kv-transfer-config says {role!r}: "
            "drop one of them"
        )
    config = {**_connector(request, given), "kv_role": role, **_loads(request)}
    given = {key: value for key, value in given.items() if key not in ("kv_connector", "remote_pull_threshold")}
    if install.device == "cpu":
        config["kv_buffer_device"] = "cpu"
        if given.get("kv_buffer_device", "cpu") != "cpu":
            raise LaunchError(
                f"kv_buffer_device {given['kv_buffer_device']!r} does not exist on this engine's device (cpu): "
                "leave it out"
            )
    own = given.get("kv_connector_extra_config", {})
    if not isinstance(own, dict):
        raise LaunchError(f"kv_connector_extra_config {own!r} in --kv-transfer-config is not an object: write {{...}}")
    extra = {**_extra(request, asked), **own}
    return {**config, **given, **({"kv_connector_extra_config": extra} if extra else {})}


CONNECTORS = {
    TransferMode.READ: ("NixlConnector", "NixlPullConnector", "NeuronNixlConnector", "BatonNixlConnector"),
    TransferMode.WRITE: ("NixlPushConnector", "BatonNixlPushConnector"),
}
"""By mode: the name that Baton's connector goes by, and others that stand for it. vLLM's config and CPU platform look
for the first one (vllm 0.32, config/vllm.py, platforms/cpu.py) and would not do for another what they do for it."""


def _connector(request: EngineRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The connector's name and where it is found."""
    name, module = given.get("kv_connector"), given.get("kv_connector_module_path")
    if module is not None:
        return {"kv_connector": name}
    ours = CONNECTORS[request.transfer_mode][0]
    if name not in (None, *CONNECTORS[request.transfer_mode]):
        raise LaunchError(
            f"kv_connector {name!r} does not do --transfer-mode {request.transfer_mode}; leave it out or name {ours}"
        )
    return {"kv_connector": ours, "kv_connector_module_path": BATON_CONNECTOR}


def _loads(request: EngineRequest) -> dict[str, Any]:
    """What becomes of a request whose KV cache could not be loaded."""
    # On a decode server the request fails: a second prefill there would hide that nothing is handed over. A prefill
    # server only loads a turn that a decode server has kept, and computes it when that is gone.
    recompute = request.bidirectional and request.role is Role.PREFILL
    return {"kv_load_failure_policy": "recompute" if recompute else "fail"}


def _extra(request: EngineRequest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The connector's own settings that our flags stand for.

    Raises:
        LaunchError: turns are asked for in write mode, a threshold is no number or given twice, or write mode's bounds
            are no good.
    """
    threshold = given.get("remote_pull_threshold")
    if request.pull_threshold is not None and threshold not in (None, request.pull_threshold):
        raise LaunchError(
            f"--remote-pull-threshold {request.pull_threshold} and remote_pull_threshold {threshold!r} in "
            "--kv-transfer-config differ: give one of them"
        )
    threshold = request.pull_threshold if threshold is None else threshold
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0):
        raise LaunchError(f"remote_pull_threshold {threshold!r} is not a whole number of tokens, 0 or more")
    if request.bidirectional and request.transfer_mode is TransferMode.WRITE:
        raise LaunchError("--bidirectional-kv needs --transfer-mode read: in write mode nothing can be pulled back")
    if request.transfer_mode is TransferMode.WRITE:
        own = given.get("kv_connector_extra_config")
        try:
            PushBounds.read((own if isinstance(own, dict) else {}).get)
        except ValueError as error:
            raise LaunchError(f"--kv-transfer-config: {error}") from error
    extra: dict[str, Any] = {"bidirectional_kv_xfer": True} if request.bidirectional else {}
    return extra if threshold is None else {**extra, "kv_recompute_threshold": threshold}


def wants_static_shapes(args: Sequence[str]) -> bool:
    """Whether the flags of an engine choose static shapes: by the switch, or by buckets in --additional-config.

    Raises:
        LaunchError: --additional-config is wrong.
    """
    try:
        return STATIC_SHAPES_FLAG in args or static_shapes_asked_for(own_config(json_flag(args, "--additional-config")))
    except ValueError as error:
        raise LaunchError(str(error)) from error


def shares_components(args: Sequence[str]) -> bool:
    """Whether an engine's flags let its replicas share weights; not so when they are wrong, which is told later."""
    try:
        sizes, _ = component_sizes(own_config(json_flag(args, "--additional-config")))
    except (LaunchError, ValueError):
        return False
    return bool(sizes.active)


BIDIRECTIONAL = ("BATON_BIDIRECTIONAL_KV", "VLLM_NEURON_BIDIRECTIONAL_KV")


def bidirectional_asked(flag: bool | None, environ: Mapping[str, str]) -> bool:
    """Whether KV caches go back for the next turn: flag, then environment.

    Raises:
        LaunchError: the two variables differ, or one is neither 0 nor 1.
    """
    given = {name: environ[name] for name in BIDIRECTIONAL if environ.get(name)}
    for name, value in given.items():
        if value not in ("0", "1"):
            raise LaunchError(f"{name}={value!r} is neither 0 nor 1")
    if flag is not None:
        return flag
    if len(set(given.values())) > 1:
        raise LaunchError(
            f"{' and '.join(f'{name}={value}' for name, value in given.items())} differ: give one of them"
        )
    return "1" in given.values()


def _defaults(
    request: EngineRequest, model: ResolvedModel, install: EngineInstall, environ: Mapping[str, str]
) -> list[tuple[str, str | None]]:
    """Flags that we add unless the user gave them himself."""
    defaults: list[tuple[str, str | None]] = [("--served-model-name", model.served_name), *model.engine_flags]
    if install.device == "cpu":
        if not environ.get(KV_SPACE):
            defaults.append(("--kv-cache-memory-bytes", str(DEFAULT_KV_CACHE_BYTES)))
        # With static shapes Baton compiles itself, and --enforce-eager would be a wish to leave it: but for components
        # that replicas share, which nothing compiles.
        compiles = wants_static_shapes(request.vllm_args) and not shares_components(request.vllm_args)
        if flag_value(request.vllm_args, "--compilation-config") is None and not compiles:
            # Inductor takes two minutes on two cores before the first token.
            defaults.append(("--enforce-eager", None))
        if ranks_of(request.vllm_args).local > 1:
            # vLLM starts an API process a data parallel rank; one is plenty, and cores are few.
            defaults.append(("--api-server-count", "1"))
    return defaults


def _environ(
    request: EngineRequest, model: ResolvedModel, install: EngineInstall, environ: Mapping[str, str]
) -> dict[str, str]:
    host, port = side_channel(request, environ)
    ours = {ENGINE_SWITCH: "1", SIDE_CHANNEL_HOST: host, SIDE_CHANNEL_PORT: str(port)}
    ours |= visible_devices(install.device, request.devices)
    if install.device == "neuron" and request.bidirectional:
        ours[BIDIRECTIONAL[1]] = "1"
    if request.cpus:
        ours[CPUS] = format_cpus(request.cpus)
    if STATIC_SHAPES_FLAG in request.vllm_args:
        ours[STATIC_SHAPES] = "1"
    if request.nixl_nap_us is not None:
        ours[NIXL_NAP_US] = str(request.nixl_nap_us)
    defaults = {"VLLM_NO_USAGE_STATS": "1"}
    if install.device == "cpu" and wants_static_shapes(request.vllm_args):
        # vLLM's API server gives up on an engine core after 10 minutes; a cold store of graphs may take longer.
        defaults["VLLM_ENGINE_READY_TIMEOUT_S"] = "3600"
    if model.local:
        defaults["HF_HUB_OFFLINE"] = "1"
        if has_state(read_config(Path(model.target))):
            # The only layout of convolution states that NIXL's connector can send.
            if environ.get(STATE_LAYOUT, "DS") != "DS":
                raise LaunchError(
                    f"{STATE_LAYOUT}={environ[STATE_LAYOUT]}: the model's layers keep a state, which is handed "
                    "over only in the layout DS; unset the variable"
                )
            defaults[STATE_LAYOUT] = "DS"
    if host in ("127.0.0.1", "localhost", "::1"):
        # Without it vLLM looks its address up by a route to the outside.
        defaults["VLLM_HOST_IP"] = "127.0.0.1"
    if install.device == "cpu":
        cores = len(request.cpus or request.available_cpus)
        if cores:
            defaults["OMP_NUM_THREADS"] = str(max(1, cores // ranks_of(request.vllm_args).workers))
        # The plugin binds the whole process; vLLM's own binding would move workers elsewhere.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {
        **{name: value for name, value in defaults.items() if name not in environ},
        **ours,
    }
