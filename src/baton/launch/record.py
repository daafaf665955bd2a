"""What is running, in a file that outlives the supervisor: whoever comes next can look at it, take it over or end it.

One file a cluster, by name, readable by its owner alone since commands hold keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import psutil
from pydantic import ValidationError

from baton.cluster import THIS_HOST, Cluster, Value
from baton.launch.errors import LaunchError

RUN = "BATON_RUN"
"""The variable by which every process of one cluster is found, also one that no file tells of."""

DEFAULT_NAME = "default"
LOCK_POLL_SECONDS = 0.05
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ProcessRecord(Value):
    """One process, as long as it runs.

    Attributes:
        name: ``P0``, ``D1``, ``proxy``.
        pid: also of its session.
        created: when it began, by the kernel's word; with the pid it is one process and no other.
        log: where its output goes.
        boots: how often it was started.
        served: whether it has answered once.
    """

    name: str
    pid: int
    created: float
    log: Path
    boots: int = 1
    served: bool = False


class ClusterRecord(Value):
    """One cluster on this host.

    Attributes:
        name: the user's word for it.
        run: of this cluster alone; the value of ``BATON_RUN`` in all its processes.
        supervisor: the process that watches it.
        control: the supervisor's Unix socket.
        scratch: its folder for sockets and temporary files.
        logs: the folder of its logs.
        asked: what `baton up` was asked for.
        cluster: what that has become: instances come and go.
        node: the host, by its name in the plan, whose share runs here.
        model_folder: of the model that engines serve.
        served_model: what requests call it.
        restarts: whether what ends is started again.
        processes: those that run.
    """

    name: str
    run: str
    supervisor: ProcessRecord
    control: Path
    scratch: Path
    logs: Path
    asked: Cluster
    cluster: Cluster
    node: str = THIS_HOST
    model_folder: str
    served_model: str
    restarts: bool = True
    processes: tuple[ProcessRecord, ...] = ()

    @property
    def supervised(self) -> bool:
        """Whether its supervisor runs."""
        return runs(self.supervisor)

    @property
    def alive(self) -> tuple[ProcessRecord, ...]:
        """Those of its processes that run."""
        return tuple(each for each in self.processes if runs(each))


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where Baton keeps what it must remember: $XDG_STATE_HOME/baton, else ~/.local/state/baton."""
    base = environ.get("XDG_STATE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".local" / "state") / "baton"


def record_path(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """
    Raises:
        LaunchError: *name* is none.
    """
    check_name(name)
    return state_folder(environ) / "clusters" / f"{name}.json"


def check_name(name: str) -> None:
    """
    Raises:
        LaunchError: *name* is none that a cluster can have.
    """
    if not _NAME.fullmatch(name):
        raise LaunchError(f"--name {name!r}: a cluster's name is 1 to 64 letters, digits, dots, dashes or underscores")


def load(name: str, environ: Mapping[str, str] = os.environ) -> ClusterRecord | None:
    """The record of the cluster *name*; None when there is none.

    Raises:
        LaunchError: the file cannot be read.
    """
    path = record_path(name, environ)
    try:
        return ClusterRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        what = error.strerror if isinstance(error, OSError) else f"{error.error_count()} of its values are wrong"
        raise LaunchError(
            f"{path} does not say what is running ({what}): look for processes with {RUN} in their environment, "
            "end them, and remove the file"
        ) from error


def save(record: ClusterRecord, environ: Mapping[str, str] = os.environ) -> None:
    """Write it, whole or not at all."""
    path = record_path(record.name, environ)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.touch(mode=0o600)
    fresh.write_text(record.model_dump_json())
    fresh.replace(path)


@contextlib.contextmanager
def holding(name: str, environ: Mapping[str, str] = os.environ, seconds: float = 0.0) -> Iterator[None]:
    """Be the only one that starts, keeps, takes over or ends the cluster *name*; who has it is waited for so long.

    A lock of this process alone: what it starts does not have it, and it is gone with the process, however that ends.

    Raises:
        LaunchError: somebody else has it, or its file cannot be made.
    """
    path = record_path(name, environ).with_name(f"{name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Closed in children (PEP 446). It is never removed: another one may have just opened it.
        lock = path.open("w")
    except OSError as error:
        raise LaunchError(f"cannot write {path}: {error.strerror}; $XDG_STATE_HOME names another folder") from error
    with lock:
        deadline = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"another command is starting or ending the cluster {name!r}: look with `baton status`, or "
                        "give another --name"
                    ) from None
            time.sleep(LOCK_POLL_SECONDS)
        yield


def forget(record: ClusterRecord, environ: Mapping[str, str] = os.environ) -> None:
    """Remove the file of *record*; that of another run of its name stays."""
    with contextlib.suppress(LaunchError):
        stored = load(record.name, environ)
        if stored is not None and stored.run == record.run:
            record_path(record.name, environ).unlink(missing_ok=True)


def known_names(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The names of all clusters that have a record."""
    return sorted(path.stem for path in (state_folder(environ) / "clusters").glob("*.json"))


def created_at(pid: int) -> float:
    """When the process *pid* began; 0 when there is none."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:
        return 0.0


def runs(process: ProcessRecord) -> bool:
    """Whether it is that very process that runs: a pid is given to another one some day."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(process.pid)
        return found.create_time() == process.created and found.status() != psutil.STATUS_ZOMBIE
    return False


def sessions_of(processes: Iterable[ProcessRecord]) -> frozenset[int]:
    """The sessions of *processes* and of all that they started."""
    found: set[int] = set()
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            family = psutil.Process(process.pid).children(recursive=True)
            found.add(process.pid)
            for each in family:
                with contextlib.suppress(OSError):
                    found.add(os.getsid(each.pid))
    return frozenset(found)


def strays(run: str, known: frozenset[int] = frozenset()) -> list[int]:
    """The sessions of processes that belong to *run* and are led by none of *known*."""
    mark = f"{RUN}={run}".encode()
    found: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(os.getsid(pid))
    return sorted(found - known - {os.getsid(0)})
