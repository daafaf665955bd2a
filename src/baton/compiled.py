"""The proxy's hot path in compiled form: machine code that mypyc made of the same sources, where there is any.

The sources are what counts: they run as they stand wherever nothing was compiled, and what was compiled of other
sources is not looked at. `scripts/compile_proxy.py` makes it, into a folder of this environment that is named by a
digest of the sources. Only `baton proxy` uses it; BATON_COMPILED=0 turns it off.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

SWITCH = "BATON_COMPILED"
LIBRARY = "baton_compiled"
"""What mypyc calls the one library that all modules are in; each module's own file only points there."""
MODULES = (
    "http.client",
    "http.client_connection",
    "http.connection",
    "http.events",
    "http.messages",
    "http.outbox",
    "http.responder",
    "http.rules",
    "http.server",
    "proxy.access_log",
    "proxy.admission",
    "proxy.answers",
    "proxy.app",
    "proxy.beat",
    "proxy.breaker",
    "proxy.deadlines",
    "proxy.deliver",
    "proxy.door",
    "proxy.engine_info",
    "proxy.errors",
    "proxy.fleet",
    "proxy.journey",
    "proxy.legs",
    "proxy.metrics",
    "proxy.modes.alone",
    "proxy.modes.read",
    "proxy.modes.single",
    "proxy.modes.write",
    "proxy.outstanding",
    "proxy.pairs",
    "proxy.passage",
    "proxy.routing.base",
    "proxy.routing.least_loaded",
    "proxy.routing.power_of_two",
    "proxy.routing.random_choice",
    "proxy.routing.round_robin",
    "proxy.samples",
    "proxy.ticket",
    "proxy.upstream",
)
"""Modules of baton that a request passes through."""

SOURCE = Path(__file__).parent
FLAGS = ("-O1", "-g0")
_READ = ("cluster.py", "compiled.py", "counters.py", "hand_over.py", "http", "proxy")
DONE = "done"


def digest() -> str:
    """Of everything that the compiled form depends on: the sources, this interpreter, and how it is made."""
    found = hashlib.sha256(f"{sys.implementation.cache_tag} {sys.platform}".encode())
    for name in _READ:
        path = SOURCE / name
        for each in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(str(each.relative_to(SOURCE)).encode() + b"\0" + each.read_bytes() + b"\0")
    return found.hexdigest()[:20]


def folder(prefix: Path | None = None) -> Path:
    """Where the compiled form of these sources belongs, in an environment at *prefix*; this one by default."""
    return (Path(sys.prefix) if prefix is None else prefix) / "lib" / "baton-compiled" / digest()


def file_of(module: str) -> str:
    """A compiled module's file in the folder."""
    return module + EXTENSION_SUFFIXES[0]


def is_made(at: Path) -> bool:
    """Whether the compiled form is in folder *at*, whole."""
    return (at / DONE).exists()


class Finder:
    """Finds the modules in *at* before the import system looks for their sources."""

    def __init__(self, at: Path) -> None:
        modules = [f"{LIBRARY}__mypyc", *(f"baton.{name}" for name in MODULES)]
        self._files = {name: at / file_of(name) for name in modules}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return None if file is None else spec_from_file_location(name, file)


_form = "Python"


def use() -> None:
    """Have the compiled modules imported from here on, where they are there; to be called before any of them is."""
    global _form  # noqa: PLW0603 - of the process
    if os.environ.get(SWITCH, "1") == "0":
        _form = f"Python, {SWITCH}=0"
        return
    if any(f"baton.{name}" in sys.modules for name in MODULES):
        # All or none: compiled modules know each other by where things lie in memory.
        return
    at = folder()
    if not is_made(at):
        _form = "Python, not compiled: see docs/install.md"
        return
    sys.meta_path.insert(0, Finder(at))
    _form = "compiled"


def form() -> str:
    """Which form this process has: compiled, or Python and why."""
    return _form
