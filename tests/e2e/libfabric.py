"""What NIXL's LIBFABRIC backend needs on a machine without EFA and without CUDA, gathered into a cache folder.

The plugin of the pinned nixl (1.5) asks for libfabric 2, which no package here has; that of nixl 1.4.1 runs with the
libfabric 1 that the mpich wheel carries. It is linked against CUDA's libraries: the runtime has a wheel, for the
driver's library three functions that say "no device" stand in. hwloc comes from the distribution.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

CACHE = Path.home() / ".cache" / "baton-tests" / "libfabric-1"
NIXL, MPICH, CUDART = "nixl-cu12==1.4.1", "mpich==5.0.2", "nvidia-cuda-runtime-cu12==12.9.79"
DRIVER = "".join(
    f"int {name}(void) {{ return 100; }}\n"  # CUDA_ERROR_NO_DEVICE
    for name in ("cuCtxSetCurrent", "cuDeviceGetPCIBusId", "cuPointerGetAttributes")
)


class Missing(Exception):
    """Something that the backend needs cannot be had here."""


def environ() -> dict[str, str]:
    """The variables that make an engine of this venv use it, over libfabric's tcp provider.

    Raises:
        Missing: a package cannot be downloaded or a program is not there; the message names it.
    """
    if not (CACHE / "done").exists():
        if platform.machine() != "x86_64" or sys.platform != "linux":
            raise Missing(f"the wheels are for x86_64 Linux, this is {sys.platform} on {platform.machine()}")
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
            _gather(Path(folder))
            shutil.rmtree(CACHE, ignore_errors=True)
            shutil.copytree(folder, CACHE, symlinks=True)
        (CACHE / "done").touch()
    paths = [str(CACHE / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"LD_LIBRARY_PATH": str(CACHE / "lib"), "PYTHONPATH": os.pathsep.join(paths), "FI_PROVIDER": "tcp"}


def _gather(folder: Path) -> None:
    lib = folder / "lib"
    lib.mkdir()
    for package in (NIXL, MPICH, CUDART):
        words = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "wheels"), package)
        _run(words, f"{package} cannot be downloaded")
    for wheel in (folder / "wheels").iterdir():
        with zipfile.ZipFile(wheel) as archive:
            if wheel.name.startswith("nixl"):
                archive.extractall(folder / "site")
                continue
            for name in archive.namelist():
                if (file := Path(name).name).startswith(("libfabric.so.1", "libcudart.so.12")):
                    (lib / file).write_bytes(archive.read(name))
    shutil.rmtree(folder / "wheels")
    (folder / "driver.c").write_text(DRIVER)
    words = ("gcc", "-shared", "-fPIC", "-o", str(lib / "libcuda.so.1"), str(folder / "driver.c"))
    _run(words, "a stand-in for CUDA's driver library cannot be built")
    _run(("apt-get", "download", "libhwloc15"), "Debian's libhwloc15 cannot be downloaded", folder)
    for package in folder.glob("libhwloc15*.deb"):
        _run(("dpkg-deb", "-x", str(package), str(folder / "deb")), "libhwloc15 cannot be unpacked")
    for library in folder.glob("deb/usr/lib/*/libhwloc.so.15"):
        shutil.copy(library, lib)
    for name in ("libfabric.so.1", "libcudart.so.12", "libhwloc.so.15"):
        if not (lib / name).exists():
            raise Missing(f"{name} is not in the package that should carry it")


def _run(words: Sequence[str], failed: str, folder: Path | None = None) -> None:
    try:
        done = subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True, timeout=240)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"{failed}: {error}") from error
    if done.returncode:
        raise Missing(f"{failed}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
