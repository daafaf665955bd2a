"""The cluster file: what `baton up` and `baton proxy` are asked for, in YAML or JSON.

Read into values and planned; nothing is started here. A flag wins over the file, the file over the environment.
PyYAML comes with vLLM; where it is missing (a host with only the proxy) the file may be JSON.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from baton.cluster import Cluster, Endpoint, Instance, Port, Role, TransferMode, Value
from baton.engine import CPUS, ENGINE_SWITCH, parse_cpus
from baton.launch.commands import (
    DEFAULT_PORTS,
    DEFAULT_SIDE_CHANNEL_PORTS,
    SIDE_CHANNEL_HOST,
    SIDE_CHANNEL_PORT,
    LaunchError,
    dashed,
)
from baton.launch.devices import share_cpus
from baton.launch.plan import port_owners

Where = tuple[str | int, ...]
"""The place of a value in the file: ``("decode", 0, "port")``."""

DEPTH = 4


class ClusterFileError(LaunchError):
    """A file that cannot be used; one line with file, key, value and remedy.

    Attributes:
        others: more of the same, a line each.
    """

    def __init__(self, message: str, others: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.others = tuple(others)


def _words(value: Any) -> Any:
    """Flags as one text or as a list of words."""
    if isinstance(value, str):
        return dashed(shlex.split(value))
    if not isinstance(value, list | tuple):
        return value
    for word in value:
        flag = str(word).partition("=")[0]
        if flag.startswith("--") and " " in flag:
            raise ValueError(f"{word!r} is a flag and its value in one: make them two items, or give all as one text")
    return dashed([word if isinstance(word, str) else json.dumps(word) for word in value])


def _cpus(value: Any) -> Any:
    """Core numbers as a list, as one number, or as text such as 0-3,8."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return parse_cpus(str(value))


def _texts(value: Any) -> Any:
    """Values of the environment are text, also where YAML reads a number."""
    if not isinstance(value, dict):
        return value
    texts = {name: each if isinstance(each, str) else json.dumps(each) for name, each in value.items()}
    ours = {SIDE_CHANNEL_HOST: "host", SIDE_CHANNEL_PORT: "side_channel_port", CPUS: "cpus"}
    for name, key in ours.items():
        if name in texts:
            raise ValueError(f"{name} is set by Baton: use the key {key}")
    if ENGINE_SWITCH in texts:
        raise ValueError(f"{ENGINE_SWITCH} is set by Baton: leave it out")
    return texts


Words = Annotated[tuple[str, ...], BeforeValidator(_words)]
Cpus = Annotated[tuple[int, ...], BeforeValidator(_cpus)]
Texts = Annotated[dict[str, str], BeforeValidator(_texts)]
Count = Annotated[int, Field(ge=1)]


class EngineDefaults(Value):
    """What holds for every engine, unless it says otherwise.

    Attributes:
        host: where it listens; side channel included.
        engine_args: `vllm serve` flags; those of an entry come after them.
        environ: variables; those of an entry win.
    """

    host: str | None = None
    engine_args: Words = ()
    environ: Texts = Field(default_factory=dict)


class EngineEntry(EngineDefaults):
    """One engine, or several alike.

    Attributes:
        port: of its API; the next replica takes the next.
        side_channel_port: its first; the next replica takes the next.
        cpus: its cores; without it the engines share all that there are.
        replicas: how many.
    """

    port: Port | None = None
    side_channel_port: Port | None = None
    cpus: Cpus | None = None
    replicas: Count = 1


class ProxyPart(Value):
    """The proxy.

    Attributes:
        host, port: where it listens.
        flags: more of `baton proxy`'s.
    """

    host: str | None = None
    port: Port | None = None
    flags: Words = ()


class ClusterFile(Value):
    """A cluster file.

    Attributes:
        model: an embedded model's name, a folder, or a hub id.
        transfer_mode: who moves the KV cache.
        proxy: the proxy.
        defaults: for all engines.
        prefill, decode: the engines.
    """

    model: str
    transfer_mode: TransferMode = TransferMode.READ
    proxy: ProxyPart = ProxyPart()
    defaults: EngineDefaults = EngineDefaults()
    prefill: Annotated[tuple[EngineEntry, ...], Field(min_length=1)]
    decode: Annotated[tuple[EngineEntry, ...], Field(min_length=1)]

    def of_role(self, role: Role) -> tuple[EngineEntry, ...]:
        return self.prefill if role is Role.PREFILL else self.decode


@dataclass(frozen=True)
class RoleFlags:
    """What flags say of one role; None where they say nothing.

    Attributes:
        count: how many servers.
        port, side_channel_port: of the first one; the next takes the next.
        engine_args: `vllm serve` flags for this role.
    """

    count: int | None = None
    port: int | None = None
    side_channel_port: int | None = None
    engine_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class Flags:
    """What the command line says; it wins over the file.

    Attributes:
        model, host, proxy_port: None where it says nothing.
        common_args: `vllm serve` flags for every engine.
        proxy_flags: more flags of the proxy.
        roles: what it says of each role.
    """

    model: str | None = None
    host: str | None = None
    proxy_port: int | None = None
    common_args: tuple[str, ...] = ()
    proxy_flags: tuple[str, ...] = ()
    roles: Mapping[Role, RoleFlags] = field(default_factory=dict)

    def of_role(self, role: Role) -> RoleFlags:
        return self.roles.get(role, RoleFlags())


# reading


def read_cluster_file(path: Path) -> ClusterFile:
    """The file at *path*: JSON when it ends so, else YAML.

    Raises:
        ClusterFileError: it cannot be read, is neither, or says what makes no sense.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ClusterFileError(f"cluster file {path}: {said}; name a YAML or JSON file") from error
    value, lines = _parse(path, text)
    if not isinstance(value, dict):
        raise ClusterFileError(f"{path}: it holds {_shown(value)}, not keys: see examples/1p1d.yaml")
    try:
        return ClusterFile.model_validate(value)
    except ValidationError as error:
        first, *others = (_say(path, lines, each) for each in error.errors(include_url=False))
        raise ClusterFileError(first, others) from error


def _parse(path: Path, text: str) -> tuple[Any, dict[Where, int]]:
    """The value of a file, and the lines of its keys where they are known."""
    if path.suffix == ".json":
        try:
            return json.loads(text), {}
        except json.JSONDecodeError as error:
            raise ClusterFileError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
    try:
        import yaml
    except ImportError as error:
        raise ClusterFileError(
            f"cluster file {path}: PyYAML is not installed here: pip install pyyaml, or write JSON and call it .json"
        ) from error
    try:
        node = yaml.compose(text, yaml.SafeLoader)
        lines: dict[Where, int] = {}
        _note_lines(path, node, (), lines)
        return yaml.safe_load(text), lines
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ClusterFileError(f"{path}{line}: not YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ClusterFileError(f"{path}: it is nested too deep") from error
    except yaml.YAMLError as error:
        raise ClusterFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def _note_lines(path: Path, node: Any, where: Where, lines: dict[Where, int]) -> None:
    """The line of every key under a YAML *node*; a key given twice would win in silence."""
    # Deeper than the deepest key (an alias may hold itself).
    if node is None or isinstance(node.value, str) or len(where) > DEPTH:
        return
    for index, each in enumerate(node.value):
        key, child = (each[0].value, each[1]) if isinstance(each, tuple) else (index, each)
        line = (each[0] if isinstance(each, tuple) else each).start_mark.line + 1
        if isinstance(key, list):
            raise ClusterFileError(f"{path}, line {line}: a key must be a word")
        if (*where, key) in lines:
            raise ClusterFileError(
                f"{path}, line {line}: {dotted((*where, key))} was given on line {lines[*where, key]} already: drop one"
            )
        lines[*where, key] = line
        _note_lines(path, child, (*where, key), lines)


def dotted(where: Where) -> str:
    """``decode[0].port``"""
    text = ""
    for each in where:
        text += f"[{each}]" if isinstance(each, int) else f".{each}" if text else each
    return text


def _say(path: Path, lines: Mapping[Where, int], error: Any) -> str:
    """One of pydantic's errors in one line: file, line, key, value, remedy."""
    where: Where = error["loc"]
    line = next((lines[where[:end]] for end in range(len(where), 0, -1) if where[:end] in lines), None)
    place = f"{path}, line {line}: " if line is not None else f"{path}: "
    key, value = dotted(where), _shown(error["input"])
    match error["type"]:
        case "extra_forbidden":
            return f"{place}there is no key {key!r} (value {value}){_nearest(where)}"
        case "missing":
            return f"{place}the key {key!r} is missing{_MISSING.get(key, '')}"
        case "too_short":
            return f"{place}{key} is {value}: a cluster needs at least one {key} server"
        case "enum":
            return f"{place}{key} is {value}: choose {error['ctx']['expected']}"
        case "value_error":
            return f"{place}{key} is {value}: {error['ctx']['error']}"
    said = error["msg"].removeprefix("Input ").replace("valid ", "")
    return f"{place}{key} is {value}: it {said}"


_MISSING = {
    "model": ": name an embedded model, a folder or a hub id",
    "prefill": ": list at least one server, such as - replicas: 1",
    "decode": ": list at least one server, such as - replicas: 1",
}


def _nearest(where: Where) -> str:
    parts: dict[str, type[Value]] = {"defaults": EngineDefaults, "proxy": ProxyPart}
    known: type[Value] = ClusterFile if len(where) == 1 else parts.get(str(where[0]), EngineEntry)
    close = difflib.get_close_matches(str(where[-1]), known.model_fields, 1)
    return f": did you mean {close[0]}?" if close else f"; there is: {', '.join(known.model_fields)}"


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:
        text = "a value that holds itself"
    return text if len(text) <= 80 else f"{text[:77]}..."


# planning


def plan_file(file: ClusterFile, flags: Flags, cpus: Sequence[int]) -> Cluster:
    """The cluster that a file and flags come to.

    Args:
        cpus: the cores that engines without cores of their own share.

    Raises:
        LaunchError: flags and file don't go together, a port has two owners or is none, a core is not here.
    """
    entries = {role: _entries(file, flags, role) for role in Role}
    shares = share_cpus(cpus, sum(map(len, entries.values())))
    places = {role: _places(file, flags, role, entries[role]) for role in Role}
    instances: list[Instance] = []
    for role in Role:
        more = flags.of_role(role)
        for index, (entry, (host, port, side)) in enumerate(zip(entries[role], places[role], strict=True)):
            share = shares[len(instances)]
            name = f"{role.letter}{index}"
            missing = sorted(set(entry.cpus or ()) - set(cpus))
            if missing:
                raise LaunchError(
                    f"{name}'s cpus are {_listed(entry.cpus or ())}, and there is no core {_listed(missing)} here: "
                    f"there are {_listed(cpus)}"
                )
            instances.append(
                Instance(
                    id=name,
                    role=role,
                    host=host,
                    port=_port(port, f"{name}'s API"),
                    side_channel_host=host,
                    side_channel_port=_port(side, f"{name}'s side channel"),
                    cpus=entry.cpus or share,
                    engine_args=(
                        *file.defaults.engine_args,
                        *entry.engine_args,
                        *flags.common_args,
                        *more.engine_args,
                    ),
                    environ={**file.defaults.environ, **entry.environ},
                )
            )
    cluster = Cluster(
        model=flags.model or file.model,
        transfer_mode=file.transfer_mode,
        proxy_host=flags.host or file.proxy.host or "127.0.0.1",
        proxy_port=flags.proxy_port or file.proxy.port or 8000,
        proxy_flags=(*file.proxy.flags, *flags.proxy_flags),
        instances=tuple(instances),
    )
    port_owners(cluster)
    return cluster


def file_endpoints(file: ClusterFile, role: Role) -> tuple[Endpoint, ...]:
    """The engines of *role* as a proxy reaches them; they may be on other hosts."""
    entries = _entries(file, Flags(), role)
    return tuple(
        Endpoint(role=role, host=host, port=_port(port, f"{role.letter}{index}'s API"))
        for index, (host, port, _) in enumerate(_places(file, Flags(), role, entries))
    )


def _entries(file: ClusterFile, flags: Flags, role: Role) -> list[EngineEntry]:
    """An entry for each engine of *role*."""
    given, count = file.of_role(role), flags.of_role(role).count
    if count is None:
        return [entry for entry in given for _ in range(entry.replicas)]
    if len(given) > 1:
        raise LaunchError(
            f"--{role} {count}: the cluster file lists {len(given)} {role} entries of their own; "
            "change the file, or leave the flag out"
        )
    return [given[0]] * count


def _places(file: ClusterFile, flags: Flags, role: Role, entries: Sequence[EngineEntry]) -> list[tuple[str, int, int]]:
    """Host, API port and side channel port of each engine of *role*."""
    said = flags.of_role(role)
    made: list[tuple[str, int, int]] = []
    replica = 0
    for index, entry in enumerate(entries):
        host = flags.host or entry.host or file.defaults.host or "127.0.0.1"
        neighbours = sum(each[0] == host for each in made)
        # The entries of one cluster file are values of their own; replicas are the same one again.
        replica = replica + 1 if index and entry is entries[index - 1] else 0
        port = _counted(said.port, index, entry.port, replica, DEFAULT_PORTS[role] + neighbours)
        default = DEFAULT_SIDE_CHANNEL_PORTS[role] + neighbours
        made.append((host, port, _counted(said.side_channel_port, index, entry.side_channel_port, replica, default)))
    return made


def _counted(flag: int | None, index: int, own: int | None, replica: int, default: int) -> int:
    """A port: counted from the flag's through the role, else from the entry's own through its replicas."""
    if flag is not None:
        return flag + index
    return own + replica if own is not None else default


def _port(port: int, owner: str) -> int:
    if not 0 < port < 65536:
        raise LaunchError(f"port {port} for {owner} is not a port number (1 to 65535)")
    return port


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
