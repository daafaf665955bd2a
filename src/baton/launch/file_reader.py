"""Reading a cluster file: YAML or JSON to a :class:`ClusterFile`, or one line a mistake.

PyYAML comes with vLLM; where it is missing (a host with only the proxy) the file may be JSON.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from baton.cluster import Role, Value
from baton.launch.cluster_file import ClusterFile
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
        found = error.errors(include_url=False)
        first, *others = (_say(path, lines, each) for each in found if not _follows(each, found))
        raise ClusterFileError(first, others) from error


def _parse(path: Path, text: str) -> tuple[Any, dict[Where, int]]:
    """The value of a file, and the lines of its keys where they are known."""
    if path.suffix == ".json":
        try:
            return json.loads(text), {}
        except json.JSONDecodeError as error:
            raise ClusterFileError(f"{path}, line {error.lineno}: not JSON: {error.msg}") from error
        except (ValueError, RecursionError) as error:
            raise ClusterFileError(f"{path}: {_unreadable(error)}") from error
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
    except yaml.YAMLError as error:
        raise ClusterFileError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    except ClusterFileError:
        raise
    except (ValueError, AttributeError, TypeError, LookupError, RecursionError) as error:
        # PyYAML's constructors raise what Python does, as of a date such as 2024-99-99.
        raise ClusterFileError(f"{path}: {_unreadable(error)}") from error


def _unreadable(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deep: a cluster file has keys in keys of a few levels"
    return f"a value in it cannot be read ({error}): put text that looks like a date or a number in quotes"


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


def _follows(error: Any, found: Sequence[Any]) -> bool:
    """Whether an error is there because of another one: a list is empty since its item is wrong, or a key is missing
    since its name is misspelled."""
    where: Where = error["loc"]
    if error["type"] == "too_short":
        return any(each["loc"][: len(where)] == where and each is not error for each in found)
    return error["type"] == "missing" and any(
        each["type"] == "extra_forbidden" and each["loc"][:-1] == where[:-1] and _closest(each["loc"]) == where[-1]
        for each in found
    )


def _say(path: Path, lines: Mapping[Where, int], error: Any) -> str:
    """One of pydantic's errors in one line: file, line, key, value, remedy."""
    where: Where = error["loc"]
    line = _line(lines, where)
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
    said = f"it {error['msg'].removeprefix('Input ').replace('valid ', '')}"
    if key in set(Role) and error["type"] == "tuple_type":
        said = "say how many servers, 1 or more, or list them, such as - replicas: 1"
    return f"{place}{key} is {value}: {said}"


_MISSING = {
    "model": ": name an embedded model, a folder or a hub id",
    "prefill": ": list at least one server, such as - replicas: 1",
    "decode": ": list at least one server, such as - replicas: 1",
}
_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "ep": "enable_expert_parallel",
    "count": "replicas",
    "env": "environ",
    "args": "engine_args",
}
"""What people say for keys."""


def _line(lines: Mapping[Where, int], where: Where) -> int | None:
    """The line of a key, else of what it stands in."""
    ways = [where]
    if len(where) > 2 and where[0] in set(Role) and where[1] == 0:
        # A role of one kind of server may stand there without being a list.
        ways.append((where[0], *where[2:]))
    found = [way[:end] for end in range(len(where), 0, -1) for way in ways if way[:end] in lines]
    return lines[found[0]] if found else None


def _nearest(where: Where) -> str:
    close = _closest(where)
    return f": did you mean {close}?" if close else f"; there is: {', '.join(_model_at(where[:-1]).model_fields)}"


def _closest(where: Where) -> str | None:
    """The key that was meant at a place: one that is there, or else one further down."""
    word, fields = str(where[-1]), _model_at(where[:-1]).model_fields
    below = {inner: f"{name}.{inner}" for name, field in fields.items() for inner in _inner_keys(field.annotation)}
    if _SHORT.get(word) in fields:
        return _SHORT[word]
    if word in below:
        return below[word]
    close = difflib.get_close_matches(word, fields, 1)
    if close:
        return close[0]
    further = difflib.get_close_matches(word, below, 1)
    return below[further[0]] if further else None


def _inner_keys(annotation: Any) -> Iterator[str]:
    """The keys of a section; a list of entries, or names of one's own, are none."""
    if isinstance(annotation, type) and issubclass(annotation, Value):
        yield from annotation.model_fields


def _model_at(where: Where) -> type[Value]:
    """The model whose keys stand at a place of the file."""
    model: type[Value] = ClusterFile
    for key in where:
        if isinstance(key, str) and key in model.model_fields:
            model = next(_models_in(model.model_fields[key].annotation), model)
    return model


def _models_in(annotation: Any) -> Iterator[type[Value]]:
    if isinstance(annotation, type) and issubclass(annotation, Value):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, default=str)
    except ValueError:
        text = "a value that holds itself"
    return text if len(text) <= 80 else f"{text[:77]}..."
