#!/usr/bin/env python3
"""Compiles the proxy's hot path with mypyc into this interpreter's environment (src/baton/compiled.py says what).

Does nothing when it is there for these sources. `scripts/bootstrap.py` runs it, with the environment's own Python;
whoever cannot (no compiler, no headers of Python, no mypy) is told so, and has the proxy in Python.

usage: scripts/compile_proxy.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


class CannotCompile(Exception):
    """The message says what is missing."""


def main() -> int:
    compiled = load(SOURCE / "baton" / "compiled.py")
    target = compiled.folder()
    if compiled.is_made(target):
        return 0
    try:
        build(compiled, target)
    except CannotCompile as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def load(path: Path) -> ModuleType:
    """A module by its file, without its package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(compiled: ModuleType, target: Path) -> None:
    """
    Raises:
        CannotCompile: something is missing.
    """
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        raise CannotCompile(f"there is no C compiler ({compiler[0]})")
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise CannotCompile(
            f"there are no headers of Python ({include}/Python.h); on Debian: apt-get install python3-dev"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        sources, shims, runtime = translate(compiled, Path(scratch) / "c")
        command = [*compiler, *compiled.FLAGS, "-fPIC", "-w", "-DNDEBUG", f"-I{include}", f"-I{runtime}"]
        command.append(f"-I{Path(scratch) / 'c'}")
        library = made / compiled.file_of(f"{compiled.LIBRARY}__mypyc")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [[*command, "-c", str(each), "-o", f"{each}.o"] for each in sources]
            jobs += [
                [*command, "-shared", str(each), "-o", str(made / compiled.file_of(name))]
                for name, each in shims.items()
            ]
            # The longest first.
            jobs.sort(key=lambda job: -max(Path(word).stat().st_size for word in job if word.endswith(".c")))
            list(pool.map(run, jobs))
        run([*compiler, "-shared", *(f"{each}.o" for each in sources), "-o", str(library)])
        (made / compiled.DONE).touch()
        for old in target.parent.iterdir():
            # What was compiled of other sources is of no use any more; a proxy that runs it has it open.
            if compiled.is_made(old):
                shutil.rmtree(old, ignore_errors=True)
        with contextlib.suppress(OSError):
            # Somebody else has been as quick.
            made.rename(target)


def translate(compiled: ModuleType, folder: Path) -> tuple[list[Path], dict[str, Path], str]:
    """The modules in C: the library's files, each module's own by its name, and where mypyc's headers are."""
    try:
        from mypyc.build import include_dir, mypycify
    except ImportError as error:
        raise CannotCompile(f"mypyc cannot be imported: {error}") from None
    paths = [str(SOURCE / "baton" / f"{name.replace('.', '/')}.py") for name in compiled.MODULES]
    said = io.StringIO()
    os.chdir(SOURCE)
    # Checked they are elsewhere; here only what is needed for compiling is installed.
    options = [
        "--config-file=",
        "--no-site-packages",
        "--follow-imports=silent",
        "--ignore-missing-imports",
        f"--cache-dir={os.devnull}",
    ]
    try:
        with contextlib.redirect_stdout(said):
            extensions = mypycify(
                [*options, *paths], multi_file=True, group_name=compiled.LIBRARY, target_dir=str(folder)
            )
    except SystemExit as error:
        raise CannotCompile(f"mypyc refused the sources:\n{said.getvalue()}{error}") from None
    library = next(each for each in extensions if each.name == f"{compiled.LIBRARY}__mypyc")
    shims = {each.name: Path(each.sources[0]) for each in extensions if each is not library}
    return [Path(each) for each in library.sources if each.endswith(".c")], shims, include_dir()


def run(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise CannotCompile(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
