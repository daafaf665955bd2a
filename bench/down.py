#!/usr/bin/env python3
"""How long `baton down` takes with small processes in the engines' and the proxy's place: with its supervisor, and
after that was killed.

usage: python -m bench.down [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.timing import HEAD, Round, row, timed
from tests.ports import free_ports

BATON = (sys.executable, "-m", "baton.cli")


def down(folder: str, *, crashed: bool) -> Round:
    """One `baton down`."""
    ports = ",".join(map(str, free_ports(5)))
    words = [sys.executable, "-m", "tests.launch.processes", "up", "default", folder, ports]
    environ = {**os.environ, "XDG_STATE_HOME": folder}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert up.stdout.readline() == "up\n"
        if crashed:
            up.kill()
            up.wait()
        (found,) = timed(
            lambda: subprocess.run([*BATON, "down"], env=environ, stdout=subprocess.DEVNULL, check=True), 1
        )
    assert not list((Path(folder) / "baton" / "clusters").iterdir())
    return found


def command(*words: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *words], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(f"seconds\n\n{HEAD}")
    print(row("Python and imports", timed(command("-c", "import baton.cli.down"), args.rounds)))
    with tempfile.TemporaryDirectory() as folder:
        for what, crashed in (("its supervisor runs", False), ("its supervisor was killed", True)):
            found = [down(folder, crashed=crashed) for _ in range(args.rounds)]
            print(row(f"`baton down`, {what}", found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
