"""The bootstrap's decisions: what is skipped, and what a failure says."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "PIP_EXTRA_INDEX_URL"),
        ("ERROR: No matching distribution found for orjson==3.13.0", "lacks this version"),
        ("OSError: [Errno 28] No space left on device", "The disk is full"),
        ("NewConnectionError: Failed to establish a new connection", "index was not reached"),
        ("ReadTimeoutError: Read timed out.", "index was not reached"),
    ],
)
def test_a_failed_step_says_what_is_missing_and_how_to_get_it(bootstrap: ModuleType, output: str, remedy: str) -> None:
    text = bootstrap.explain("installing", f"WARNING: noise\n{output}\n")
    assert remedy in text
    assert output in text
    assert "noise" not in text


def test_a_lock_that_is_in_is_not_installed_again(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        steps.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    (tmp_path / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    lock = tmp_path / "a.txt"
    lock.write_text("x==1\n# comment\ny==2  # why\n")
    assert bootstrap.count_pins(lock) == 2
    bootstrap.install_locks(tmp_path, [lock])
    assert steps[0][1:5] == ["-m", "pip", "install", "--no-deps"]
    done = len(steps)
    bootstrap.install_locks(tmp_path, [lock])
    assert len(steps) == done
    lock.write_text("x==2\n")
    bootstrap.install_locks(tmp_path, [lock])
    assert len(steps) == 2 * done


def test_a_failed_install_leaves_no_stamp(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "boom\n")

    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    lock = tmp_path / "a.txt"
    lock.write_text("x==1\n")
    with pytest.raises(bootstrap.Failed, match="boom"):
        bootstrap.install_locks(tmp_path, [lock])
    assert not list(tmp_path.glob(".installed-*"))
