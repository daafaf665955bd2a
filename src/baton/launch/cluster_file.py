"""The cluster file: what `baton up` and `baton proxy` are asked for, in YAML or JSON.

Read into values here; file_plan.py makes a cluster of them. PyYAML comes with vLLM; where it is missing (a host with
only the proxy) the file may be JSON.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from baton.cluster import Port, Role, TransferMode, Value
from baton.engine import CPUS, ENGINE_SWITCH, parse_cpus
from baton.launch.commands import SIDE_CHANNEL_HOST, SIDE_CHANNEL_PORT, dashed
from baton.launch.errors import LaunchError

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
        bidirectional_kv, remote_pull_threshold: as the flags of `baton up`.
        proxy: the proxy.
        defaults: for all engines.
        prefill, decode: the engines.
    """

    model: str
    transfer_mode: TransferMode = TransferMode.READ
    bidirectional_kv: bool = False
    remote_pull_threshold: Annotated[int, Field(ge=0)] | None = None
    proxy: ProxyPart = ProxyPart()
    defaults: EngineDefaults = EngineDefaults()
    prefill: Annotated[tuple[EngineEntry, ...], Field(min_length=1)]
    decode: Annotated[tuple[EngineEntry, ...], Field(min_length=1)]

    def of_role(self, role: Role) -> tuple[EngineEntry, ...]:
        return self.prefill if role is Role.PREFILL else self.decode


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
