#!/usr/bin/env python3
"""Makes .venv hold exactly what the locks say, and nothing twice.

Standard library only: it runs before anything is installed. `make venv` calls it.

usage: scripts/bootstrap.py [--venv DIR] [--dev]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "locks"
NEEDED_GB = 4.0
DEAD_WEIGHT = (
    "torch/test",  # compiled C++ tests
    "nixl_ep_cu12",  # expert-parallel kernels for CUDA
)
TORCH_HELP = (
    "torch's CPU build (the +cpu version in locks/engine-cpu.txt) is not on the package index that pip uses.\n"
    "  Set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, or PIP_FIND_LINKS to a folder that holds the wheel, "
    "and run this again."
)


class Failed(Exception):
    """A step that could not be done; the message says what is missing and how to get it."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Make .venv hold what the locks say.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", metavar="DIR")
    parser.add_argument("--dev", action="store_true", help="what tests, lint and types need, too")
    args = parser.parse_args()
    try:
        bootstrap(args.venv.resolve(), dev=args.dev)
    except Failed as error:
        print(f"bootstrap: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("bootstrap: interrupted; run it again and it goes on", file=sys.stderr)
        return 130
    return 0


def bootstrap(venv: Path, *, dev: bool) -> None:
    if sys.version_info < (3, 11):
        raise Failed(
            f"this is Python {sys.version.split()[0]}; Baton needs 3.11 or newer. "
            "Name one that is: make PYTHON=python3.11 venv"
        )
    create(venv)
    install_locks(venv, [LOCKS / f"{name}.txt" for name in ("core", "engine-cpu", "model", *(["dev"] if dev else []))])
    install_baton(venv)


def create(venv: Path) -> None:
    if (venv / "bin" / "python").exists() and (venv / "bin" / "pip").exists():
        return
    free = shutil.disk_usage(venv.parent).free / 1e9
    if free < NEEDED_GB:
        raise Failed(f"{venv.parent} has {free:.1f} GB free; the engine's packages need {NEEDED_GB:.0f} GB")
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        raise Failed(
            "this Python cannot make virtual environments (no ensurepip). On Debian: apt-get install python3-venv"
        ) from None
    step(f"creating {venv}", [sys.executable, "-m", "venv", "--clear", str(venv)])


def install_locks(venv: Path, locks: list[Path]) -> None:
    """Install what the *locks* pin, without dependencies; one that is in already is skipped."""
    digests = {lock: hashlib.sha256(lock.read_bytes()).hexdigest() for lock in locks}
    stamps = {lock: venv / f".installed-{lock.stem}" for lock in locks}
    missing = [lock for lock in locks if not stamps[lock].exists() or stamps[lock].read_text() != digests[lock]]
    if not missing:
        return
    for lock in missing:
        stamps[lock].unlink(missing_ok=True)
    names = ", ".join(lock.stem for lock in missing)
    # Compiling is left to compileall, which uses every core; pip compiles on one.
    requirements = [word for lock in missing for word in ("-r", str(lock))]
    pip(venv, f"installing {sum(map(count_pins, missing))} packages ({names})", ["--no-compile", *requirements])
    trim(venv)
    compile_command = [str(venv / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(site_packages(venv))]
    # Some packages ship templates that are no Python; that is theirs.
    step("compiling them", compile_command, may_fail=True)
    for lock in missing:
        stamps[lock].write_text(digests[lock])


def count_pins(lock: Path) -> int:
    return sum(1 for line in lock.read_text().splitlines() if line.split("#")[0].strip())


def trim(venv: Path) -> None:
    """Remove the folders of DEAD_WEIGHT: 190 MB that the wheels carry and no engine on CPU opens."""
    for folder in DEAD_WEIGHT:
        shutil.rmtree(site_packages(venv) / folder, ignore_errors=True)


def install_baton(venv: Path) -> None:
    stamp = venv / ".installed-baton"
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == digest:
        return
    pip(venv, "installing baton-serve", ["--no-build-isolation", "-e", str(ROOT)])
    stamp.write_text(digest)


def pip(venv: Path, what: str, args: list[str]) -> None:
    command = [str(venv / "bin" / "python"), "-m", "pip", "install", "--no-deps", "--quiet"]
    step(what, [*command, "--disable-pip-version-check", "--no-input", *args])


def site_packages(venv: Path) -> Path:
    return next((venv / "lib").glob("python3*")) / "site-packages"


def step(what: str, command: list[str], *, may_fail: bool = False) -> None:
    """Run *command* and say how long it took; its output is shown only when it fails."""
    print(f"  {what} ...", end="", flush=True)
    started = time.monotonic()
    environ = {**os.environ, "PIP_ROOT_USER_ACTION": "ignore"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ, stdin=subprocess.DEVNULL)
    print(f" {time.monotonic() - started:.0f} s", flush=True)
    if done.returncode and not may_fail:
        raise Failed(explain(what, done.stderr or done.stdout))


def explain(what: str, output: str) -> str:
    """What failed, the lines that matter, and the remedy where we know one."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING")]
    tail = "\n  ".join(lines[-6:])
    text = f"{what} failed:\n  {tail}"
    if "torch==" in output and "No matching distribution" in output:
        return f"{text}\n{TORCH_HELP}"
    if "No matching distribution" in output:
        return f"{text}\nThe index that pip uses lacks this version: check `pip config list`, or use a full mirror."
    if "No space left" in output:
        return f"{text}\nThe disk is full: the engine's packages need {NEEDED_GB:.0f} GB."
    if any(word in output for word in ("ConnectionError", "NewConnectionError", "Max retries", "timed out")):
        return f"{text}\nThe package index was not reached: check the network or the proxy, then run this again."
    return text


if __name__ == "__main__":
    sys.exit(main())
