"""`baton up` as a person starts it, in a scratch folder of its own, so that whatever it leaves there is seen."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from baton.launch.leftovers import shared_memory_of
from tests.e2e.engines import BATON, START_SECONDS, status
from tests.ports import free_ports


class Up:
    """One `baton up`.

    Args:
        folder: for its logs and its state.
        words: of the command; ports and logs are added.
        ports: of the proxy, the first prefill and decode server, and of their side channels; None takes free ones.

    Attributes:
        process: the supervisor that was started last.
        environ: that every command on it needs.
        family: every process that was ever seen under it.
    """

    def __init__(self, folder: Path, *words: str, ports: Sequence[int] | None = None) -> None:
        self.ports = list(ports or free_ports(5))
        self.port, prefill, decode, p_side, d_side = self.ports
        self.scratch = Path(tempfile.mkdtemp(prefix="up-", dir="/tmp"))  # short: it holds sockets
        self.shared_before = set(Path("/dev/shm").iterdir())
        self.out, self.err, self.logs = folder / "out", folder / "err", folder / "logs"
        at = words.index("--") if "--" in words else len(words)
        flags = {
            "--port": self.port,
            "--prefill-port": prefill,
            "--decode-port": decode,
            "--prefill-side-channel-port": p_side,
            "--decode-side-channel-port": d_side,
            "--log-dir": self.logs,
        }
        own = [str(word) for pair in flags.items() for word in pair]
        self.argv = [*BATON, "up", *words[:at], *own, *words[at:]]
        self.environ = {**os.environ, "TMPDIR": str(self.scratch), "XDG_STATE_HOME": str(folder / "state")}
        self.family: set[psutil.Process] = set()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it; again, when its supervisor has gone."""
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                self.argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=self.environ
            )

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while text not in self.out.read_text():
            assert self.process.poll() is None, f"it ended: {self.out.read_text()} {self.err.read_text()}"
            assert time.monotonic() < deadline, f"no {text!r} in {self.out.read_text()}"
            self.remember()
            time.sleep(0.05)
        self.remember()

    def remember(self) -> None:
        """Note every process under it, to ask after each one in the end."""
        if psutil.pid_exists(self.process.pid):
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))

    def end(self) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            logs = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in sorted(self.logs.iterdir())]
            said = "\n".join([self.out.read_text(), self.err.read_text(), *logs])
            raise AssertionError(f"it runs on after {START_SECONDS} s:\n{said}") from None

    def left_behind(self) -> dict[str, object]:
        """What still stands of it; everything empty when it cleaned up."""
        alive = [each.pid for each in self.family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
        new = set(Path("/dev/shm").iterdir()) - self.shared_before
        return {
            "processes": alive,
            # What somebody who lives has open is a neighbour's.
            "shared memory": sorted(new - in_use()) if new else [],
            "scratch": sorted(path.name for path in self.scratch.iterdir()),
            "listeners": [port for port in self.ports if status(f"http://127.0.0.1:{port}/") is not None],
        }


NOTHING: dict[str, object] = {"processes": [], "shared memory": [], "scratch": [], "listeners": []}


def in_use() -> set[Path]:
    """Named shared memory that any process has open."""
    groups = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            groups.add(os.getpgid(pid))
    return set[Path]().union(*map(shared_memory_of, groups))


def clear(up: Up) -> None:
    """Kill what is left of it, after a test that failed."""
    up.remember()
    for process in up.family:
        if process.is_running():
            process.kill()
    if up.process.poll() is None:
        up.process.kill()
        up.process.wait()
    shutil.rmtree(up.scratch, ignore_errors=True)
