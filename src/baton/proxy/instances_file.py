"""The instances in a file of their own, which may change while the proxy runs. Reading is pure but for the file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from baton.cluster import Endpoint, Role

EXAMPLE = '[{"role": "prefill", "url": "http://10.0.1.10:8100"}, ...]'
_KEYS = {"role", "url"}

Stamp = tuple[int, int, int]
"""What changes with a file: when it was written (nanoseconds), its size, its number."""


class BadInstancesFile(ValueError):
    """A file that is not taken; the message says why."""


def read(path: Path) -> tuple[Endpoint, ...]:
    """The instances that a file names.

    Raises:
        BadInstancesFile: it cannot be read, or anything in it is wrong.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise BadInstancesFile(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        return parse(raw)
    except BadInstancesFile as error:
        raise BadInstancesFile(f"{path}: {error}") from None


def parse(raw: bytes) -> tuple[Endpoint, ...]:
    """A list of objects with ``role`` and ``url``, in JSON or YAML.

    Raises:
        BadInstancesFile: it is something else, or names one address twice.
    """
    value = _loaded(raw)
    if not isinstance(value, list):
        raise BadInstancesFile(f"it holds no list such as {EXAMPLE}")
    made: dict[str, Endpoint] = {}
    for number, row in enumerate(value, 1):
        if not isinstance(row, dict) or set(row) != _KEYS:
            raise BadInstancesFile(f"entry {number} is {row!r}, not an object with role and url")
        try:
            endpoint = endpoint_of(row["role"], row["url"])
        except ValueError as error:
            raise BadInstancesFile(f"entry {number}: {error}") from None
        first = made.setdefault(endpoint.authority, endpoint)
        if first is not endpoint:
            raise BadInstancesFile(
                f"entry {number}: {endpoint.authority} is named twice, as a {first.role} and a {endpoint.role} server"
            )
    return tuple(made.values())


def endpoint_of(role: object, url: object) -> Endpoint:
    """
    Raises:
        ValueError: one of them is wrong.
    """
    if not isinstance(role, str) or role not in list(Role):
        raise ValueError(f"role is {role!r}, neither 'prefill' nor 'decode'")
    if not isinstance(url, str):
        raise ValueError(f"{url!r} is not a URL such as http://host:8100")
    return Endpoint.from_url(Role(role), url)


def _loaded(raw: bytes) -> object:
    try:
        value: object = orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Only here: JSON needs no PyYAML.
        try:
            import yaml
        except ImportError:
            raise BadInstancesFile(
                "it is not JSON, and for YAML PyYAML is not installed here: pip install pyyaml"
            ) from None
        try:
            value = yaml.safe_load(raw)
        except Exception as error:
            # PyYAML lets through whatever its constructors raise: ValueError for 2024-99-99, RecursionError, others.
            where = " ".join(str(error).split()) or type(error).__name__
            raise BadInstancesFile(f"it is neither JSON nor YAML: {where}") from None
    return value


@dataclass(frozen=True)
class Change:
    """From one set of instances to another.

    Attributes:
        added, kept, gone: endpoints; those that are kept are in both.
    """

    added: tuple[Endpoint, ...]
    kept: tuple[Endpoint, ...]
    gone: tuple[Endpoint, ...]


def change(old: Iterable[Endpoint], new: Sequence[Endpoint]) -> Change:
    """What makes *new* of *old*; one that changes its role goes, and comes as another."""
    before, after = list(old), list(new)
    return Change(
        tuple(each for each in after if each not in before),
        tuple(each for each in after if each in before),
        tuple(each for each in before if each not in after),
    )


def stamp(path: Path) -> Stamp | None:
    """What changes with the file: None when it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
