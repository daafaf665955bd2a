#!/usr/bin/env python3
"""How long `baton down` takes with small processes in the engines' and the proxy's place: with its supervisor, and
after that was killed.

usage: python -m bench.down [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.ports import free_ports

BATON = (sys.executable, "-m", "baton.cli")


def down(folder: str, *, crashed: bool) -> float:
    """Seconds of one `baton down`."""
    ports = ",".join(map(str, free_ports(5)))
    words = [sys.executable, "-m", "tests.launch.processes", "up", "default", folder, ports]
    environ = {**os.environ, "XDG_STATE_HOME": folder}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as up:
        assert up.stdout is not None
        assert up.stdout.readline() == "up\n"
        if crashed:
            up.kill()
            up.wait()
        started = time.perf_counter()
        subprocess.run([*BATON, "down"], env=environ, stdout=subprocess.DEVNULL, check=True)
        seconds = time.perf_counter() - started
    assert not list((Path(folder) / "baton" / "clusters").iterdir())
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| seconds | p50 | max |\n| --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for what, crashed in (("its supervisor runs", False), ("its supervisor was killed", True)):
            found = [down(folder, crashed=crashed) for _ in range(args.rounds)]
            print(f"| `baton down`, {what} | {statistics.median(found):.2f} | {max(found):.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
