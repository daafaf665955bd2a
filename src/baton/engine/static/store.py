"""Compiled graphs on disk: a second start compiles nothing.

A folder a user, shared by all of his engines: an artifact of torch a graph under the hash of everything that it depends
on, and beside them Inductor's own folder with the compiled kernels. A checksum stands with each file; what does not
match it is removed and made again. Nothing here knows of models.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.baton")

FOLDER = "BATON_GRAPH_CACHE"
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
FORMAT = 2
_DIGEST_BYTES = 32


def folder(environ: Mapping[str, str]) -> Path:
    """Where graphs are kept: $BATON_GRAPH_CACHE, else baton/graphs under the user's cache folder."""
    given = environ.get(FOLDER)
    if given:
        return Path(given).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "baton" / "graphs"


def key_of(parts: Mapping[str, Any]) -> str:
    """The name of a graph that depends on *parts*: any of them changed gives another one."""
    text = json.dumps({"format": FORMAT, **parts}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def cpu_of(cpuinfo: str) -> str:
    """What compiled code depends on of the text of /proc/cpuinfo: model and instruction sets."""
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    lines = (line for line in cpuinfo.splitlines() if line.partition(":")[0].strip() in wanted)
    return "\n".join(sorted({line.strip() for line in lines}))


class Store:
    """The graphs in one folder; not to be trusted with a folder that others may write to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kernels = root / "inductor"

    def open(self) -> None:
        """Make the folder, and remove kernels that are not what they were."""
        self.kernels.mkdir(parents=True, exist_ok=True)
        self.root.chmod(0o700)
        for kernel in self.kernels.rglob("*.so"):
            with contextlib.suppress(OSError):
                said = _sum_file(kernel)
                if said.exists() and said.read_text() != _digest(kernel.read_bytes()).hex():
                    logger.warning("static shapes: the kernel %s is damaged: it is compiled again", kernel)
                    kernel.unlink()
                    said.unlink()

    def read(self, key: str) -> bytes | None:
        """The artifact *key*, or None; a damaged one is removed."""
        path = self._path(key)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        if data[:_DIGEST_BYTES] == _digest(data[_DIGEST_BYTES:]):
            return data[_DIGEST_BYTES:]
        logger.warning("static shapes: the stored graph %s is damaged: it is compiled again", path)
        self.remove(key)
        return None

    def write(self, key: str, artifact: bytes) -> None:
        """Keep *artifact*, and vouch for the kernels that are there now."""
        _write_at_once(self._path(key), _digest(artifact) + artifact)
        for kernel in self.kernels.rglob("*.so"):
            said = _sum_file(kernel)
            if not said.exists():
                with contextlib.suppress(OSError):
                    _write_at_once(said, _digest(kernel.read_bytes()).hex().encode())

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / f"{key}.graph"


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _sum_file(kernel: Path) -> Path:
    return kernel.with_suffix(".so.sha256")


def _write_at_once(path: Path, data: bytes) -> None:
    """Readers see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        logger.warning("static shapes: %s could not be kept: %s", path, error)
