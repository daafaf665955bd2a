"""Versions that are known to break disaggregated serving, and those that nobody has tried. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton.launch.devices import TESTED_VLLM

Release = tuple[int, ...]


@dataclass(frozen=True)
class Known:
    """What is known of some versions of a package.

    Attributes:
        package: its distribution.
        hits: whether a release is one of them.
        what: the versions and what they do, for people.
        remedy: what to install.
        broken: whether an engine cannot work with it; else it may, or some of the time.
    """

    package: str
    hits: Callable[[Release], bool]
    what: str
    remedy: str
    broken: bool = True


KNOWN = (
    Known(
        "vllm",
        lambda release: release < (0, 21),
        "before 0.21 has no kv_transfer_params in streams and another NIXL connector",
        f"install {TESTED_VLLM}",
    ),
    Known(
        "nixl",
        lambda release: release < (0, 6),
        "before 0.6 does not take the number of threads that vLLM gives it (num_threads)",
        "install nixl 1.5.1",
    ),
    # ai-dynamo/nixl#1668
    Known(
        "nixl",
        lambda release: release[:2] == (0, 10),
        "0.10 brings UCX 1.20.0, with which two engines that start together on one host hang",
        "install nixl 1.5.1, or start the engines one after the other",
        broken=False,
    ),
    # vllm-project/vllm#45843
    Known(
        "nixl",
        lambda release: release[:2] == (1, 3),
        "1.3 fails tests of vLLM's own, which was pinned below it",
        "install nixl 1.5.1",
        broken=False,
    ),
)


def release_of(version: str) -> Release:
    """The numbers that a version starts with: (0, 32, 0) of 0.32.0+cpu; empty when there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


def known_of(versions: Mapping[str, str]) -> list[tuple[Known, str]]:
    """What is known of *versions*, by package, with the version; nothing of those that cannot be read."""
    return [
        (known, version)
        for known in KNOWN
        if (version := versions.get(known.package, "")) and (release := release_of(version)) and known.hits(release)
    ]


def untested(version: str) -> bool:
    """Whether a vLLM is of another minor version than the one that Baton is tested with."""
    return release_of(version)[:2] != release_of(TESTED_VLLM)[:2]
