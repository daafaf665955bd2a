"""Whether a command of the docs would be taken: by Baton's parsers and planner, the proxy's routes, the script itself.

Nothing is started. A program that is not known here is an error, and so is whatever the product refuses.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import importlib.util
import io
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import pytest

from baton.cli import main
from baton.cli.cluster_flags import split
from baton.cli.main import _COMMANDS as COMMANDS
from baton.cli.parser import Failure, Parser
from baton.launch import LaunchError
from baton.models import ModelError
from baton.proxy import legs
from baton.proxy.admin import _POSTED as PASSED_POSTS
from baton.proxy.admin import _READ as PASSED_READS
from baton.proxy.admin import ADMIN, OPEN
from baton.proxy.instances_file import endpoint_of
from tests.docs.pages import ROOT, Command

FILTERS = frozenset({"grep", "head", "tail", "jq", "tee"})
"""What may stand behind a pipe."""

FIXED = {
    (".", ".venv/bin/activate"),
    (".ci/run",),
    ("fi_info", "-p", "efa"),
    ("apt-get", "install", "python3-venv"),
    ("apt-get", "install", "curl"),
    ("pip", "config", "list"),
}
"""Commands that are what they are, and none of ours but for `.ci/run`."""


class Wrong(AssertionError):
    """A command that would not do what the docs say."""


class Seen(Exception):
    """The words were taken, and the work would begin.

    Attributes:
        parser: what was about to read them, where that is asked for.
    """

    def __init__(self, parser: argparse.ArgumentParser | None = None) -> None:
        super().__init__()
        self.parser = parser


def check(command: Command) -> None:
    """
    Raises:
        Wrong: the command would be refused, or nobody knows it.
    """
    words = command.words
    for name in command.environ:
        if not known_variable(name):
            raise Wrong(f"nobody reads the variable {name}")
    if not words or words in FIXED or (command.piped and words[0] in FILTERS):
        if words == (".ci/run",) and not (ROOT / ".ci/run").stat().st_mode & 0o100:
            raise Wrong(".ci/run is no program")
        return
    checker = PROGRAMS.get(words[0])
    if checker is None:
        raise Wrong(f"{words[0]!r} is no program that this test knows how to check: {' '.join(words)}")
    try:
        checker(words[1:])
    except (Failure, LaunchError, ModelError, ValueError, OSError) as error:
        raise Wrong(f"{' '.join(words)}: {error}") from error


def known_variable(name: str) -> bool:
    """Whether a variable is Baton's or of somebody whose variables pass through."""
    return name.startswith(("BATON_", "VLLM_", "UCX_", "NIXL_", "OMP_", "HF_", "FI_", "PIP_", "XDG_")) or name in (
        "MODEL",
        "CUDA_VISIBLE_DEVICES",
        "NEURON_VISIBLE_DEVICES",
    )


# --- baton


def baton(words: Sequence[str]) -> None:
    if not words or words[0] not in COMMANDS:
        raise Wrong(f"baton has no command {' '.join(words[:1])}")
    BATON.get(words[0], answered)(words)


def answered(words: Sequence[str]) -> None:
    """Run it: it says something, and the words were not what is wrong."""
    code, out, err = ran(words)
    quiet = code == 1 and words[0] in RUNNING and re.search(r"no cluster '\w+' is running", err)
    if code != 0 and not quiet:
        raise Wrong(f"baton {' '.join(words)}: exit code {code}: {err or out}")


RUNNING = ("status", "logs", "scale", "drain", "restart", "down")
"""What speaks of a cluster that runs; here none does."""


def ran(words: Sequence[str]) -> tuple[int, str, str]:
    """Exit code, output and errors of `baton` with *words*, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(list(words))
        except SystemExit as error:
            code = int(error.code or 0)
    return code, out.getvalue(), err.getvalue()


def engine(words: Sequence[str]) -> None:
    answered([*words, "--dry-run"])
    foreign(words[1:], "engine")


def up(words: Sequence[str]) -> None:
    before, after = split(words[1:])
    answered(["up", *before, "--dry-run", "--", *after])
    fits(words)


def fits(words: Sequence[str]) -> list[str]:
    """Whether the cluster that *words* of `baton up`, `plan` or `doctor` describe would be let start; its hosts."""
    before, after = split(words[1:])
    args = parser_of(words[0]).parse_all(before)
    kept = _known_to_plan(before, words[0])
    if args.cluster is not None and "--host" in kept:
        # There it names the host that this is.
        at = kept.index("--host")
        del kept[at : at + 2]
    code, out, err = ran(["plan", *kept, "--json", "--", *after])
    if code != 0:
        raise Wrong(f"{' '.join(words)}: {err}")
    hosts = json.loads(out)["hosts"]
    for process in (process for host in hosts for process in host["processes"]):
        foreign(process["argv"][4:], "engine" if process["role"] != "proxy" else "proxy")
    return [host["name"] for host in hosts]


def _known_to_plan(words: Sequence[str], name: str) -> list[str]:
    """*words* of `baton NAME` without the flags that `baton plan` has not, and without its own ways to print."""
    plans = flags_of(parser_of("plan")) - {"--json", "--shell", "--output", "--check"}
    takes = {flag: action.nargs != 0 for action in parser_of(name)._actions for flag in action.option_strings}
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if not flag.startswith("-") or flag in plans:
            kept.append(word)
        elif takes[flag] and not equals:
            next(rest)
    return kept


def plan(words: Sequence[str]) -> None:
    answered(words)
    if "--schema" not in words:
        fits(words)


def doctor(words: Sequence[str]) -> None:
    hosts = fits(words)
    args = parser_of("doctor").parse_all(split(words[1:])[0])
    said = getattr(args, "on", None) or (args.host if args.cluster is not None else None)
    if said is not None and said not in hosts:
        raise Wrong(f"{' '.join(words)}: there is no host {said}")


def init(words: Sequence[str]) -> None:
    """It replaces no file: here nobody wants the one that an earlier block has written."""
    Path("baton.yaml").unlink(missing_ok=True)
    answered(words)


def until(names: Sequence[str]) -> Callable[[Sequence[str]], None]:
    """Run it up to where it would begin its work, which is where it calls one of *names*."""

    def run(words: Sequence[str]) -> None:
        def stop(*_: Any, **__: Any) -> Any:
            raise Seen

        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(mock.patch(f"baton.cli.{words[0]}.{name}", stop))
            stack.enter_context(mock.patch("resource.setrlimit"))
            try:
                answered(words)
            except Seen:
                return

    return run


BATON: dict[str, Callable[[Sequence[str]], None]] = {
    "engine": engine,
    "up": up,
    "plan": plan,
    "doctor": doctor,
    "proxy": until(["serve", "serve_workers"]),
    "sim": until(["Lab", "compare", "campaign"]),
    "status": until(["observe_proxy"]),
    "init": init,
    "model": lambda words: answered(words) if words[1:2] == ("list",) else None,
}


@functools.cache
def parser_of(name: str) -> Parser:
    """The parser of `baton NAME`, as it stands when it is about to read its words."""

    def stop(self: argparse.ArgumentParser, *_: Any) -> Any:
        raise Seen(self)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop):
        try:
            importlib.import_module(f"baton.cli.{name}").run([])
        except Seen as seen:
            assert isinstance(seen.parser, Parser)
            return seen.parser
    raise AssertionError(f"baton {name} has read no words")


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every flag of a parser and of its commands, but for --help."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found |= flags_of(each)
    return found - {"-h", "--help"}


def foreign(words: Sequence[str], name: str) -> None:
    """Whether flags are Baton's for that command, or vLLM's; where there is no vLLM that stays open."""
    theirs = vllm_flags()
    if not theirs:
        return
    ours = flags_of(parser_of(name))
    for word in words:
        flag = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", flag) and flag not in ours | theirs:
            raise Wrong(f"{flag} is neither a flag of baton {name} nor of vllm serve")


@functools.cache
def vllm_flags() -> frozenset[str]:
    """The long flags of `vllm serve`, read from the fields of its classes without importing it; empty without vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return frozenset()
    folder, names = Path(found.origin).parent, {"config", "headless", "api-server-count"}
    for file in ("engine/arg_utils.py", "entrypoints/launchers/cli_args.py"):
        tree = ast.parse((folder / file).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Args"):
                fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
                names |= {each.id.replace("_", "-") for each in fields if isinstance(each, ast.Name)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("--"):
                names.add(node.value[2:])
    names = {name for name in names if re.fullmatch(r"[a-z][\w-]+", name)}
    return frozenset(f"--{no}{name}" for name in names for no in ("", "no-"))


# --- curl


class _Curl(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise Wrong(f"curl: {message}")


def curl(words: Sequence[str]) -> None:
    parser = _Curl(allow_abbrev=False)
    for flag in ("-s", "-i", "-N", "-f"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("-X")
    parser.add_argument("-H", action="append", default=[])
    parser.add_argument("-d")
    parser.add_argument("url")
    args = parser.parse_args(list(words))
    for header in args.H:
        if not re.fullmatch(r"[\w-]+: \S.*", header):
            raise Wrong(f"curl: {header!r} is no header")
    url = urlsplit(args.url if "://" in args.url else f"http://{args.url}")
    method = args.X or ("POST" if args.d is not None else "GET")
    body = None if args.d is None else json.loads(args.d)
    if method not in methods(url.path, url.port or 80):
        raise Wrong(f"nothing answers {method} {url.path} on port {url.port}")
    if url.path in legs.RULES:
        if not isinstance(body, dict) or "model" not in body or not {"prompt", "messages", "input"} & set(body):
            raise Wrong(f"curl: {args.d} asks for nothing")
        legs.parse(json.dumps(body).encode())
    if (method, url.path) == ("POST", ADMIN):
        endpoint_of(body["role"], body["url"])


def methods(path: str, port: int) -> set[str]:
    """What answers there: at the proxy, or at an engine, which is on another port than 8000."""
    if port != 8000:
        engines = {"/metrics", "/health", "/baton/engine", "/version", "/v1/models", "/sim/ledger", "/sim/faults"}
        if path.startswith("/sim/") and path not in engines:
            return {"POST"} if path.rpartition("/")[2] in ("restart", "kill", "start", "stall", "wake") else set()
        return {"GET", "POST"} if path == "/sim/faults" else {"GET"} if path in engines else set(_posted(path))
    if path in OPEN or path in PASSED_READS:
        return {"GET"}
    if path == ADMIN:
        return {"GET", "POST"}
    if re.fullmatch(rf"{ADMIN}/[PD]\d+", path):
        return {"GET", "DELETE"}
    if re.fullmatch(rf"{ADMIN}/[PD]\d+/drain", path):
        return {"POST"}
    return set(_posted(path))


def _posted(path: str) -> Iterator[str]:
    if path in legs.RULES or path in PASSED_POSTS:
        yield "POST"


# --- make, pip, python


def make(words: Sequence[str]) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))
    for word in words:
        if "=" not in word and word not in targets:
            raise Wrong(f"make has no target {word}; there are {', '.join(sorted(targets))}")


def pip(words: Sequence[str]) -> None:
    """`pip install` of this tree, with extras that it has, or of what a lock pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    locked = {
        line.partition("==")[0].lower()
        for lock in (ROOT / "locks").glob("*.txt")
        for line in lock.read_text().splitlines()
    }
    if words[:1] != ("install",):
        raise Wrong(f"pip {' '.join(words)}: only pip install is known here")
    for word in words[1:]:
        name, _, extras = word.rstrip("]").partition("[")
        if name not in (".", project["name"]) and name.lower() not in locked:
            raise Wrong(f"pip: no lock pins {name}")
        for extra in filter(None, extras.split(",")):
            if extra not in project["optional-dependencies"]:
                raise Wrong(f"pip: {name} has no extra {extra}")


SOURCE_OF_ENGINES = ROOT / "src" / "baton" / "engine"


def python(words: Sequence[str]) -> None:
    """One of our scripts: it reads its words by its own parser, and is stopped there."""
    module = words[0] == "-m"
    name, rest = (words[1], words[2:]) if module else (words[0], words[1:])
    if module and name == "pytest":
        for word in rest:
            if not word.startswith("-") and not (ROOT / word.partition("::")[0]).exists():
                raise Wrong(f"pytest: there is no {word}")
        return
    file = next(
        (each for each in (ROOT / name, *(_modules(name) if module else ())) if each.is_file()),
        None,
    )
    if file is None:
        raise Wrong(f"python: there is no {name}")
    if "argparse" not in file.read_text() or SOURCE_OF_ENGINES in file.parents:
        # What reads its words by itself, or by vLLM.
        return

    def stop(self: argparse.ArgumentParser, args: Any = None, _: Any = None) -> Any:
        _, unknown = self.parse_known_args(args)
        if unknown:
            raise Wrong(f"{name} knows no {unknown[0]}")
        raise Seen

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "path", [str(ROOT if module else file.parent), *sys.path]),
        mock.patch.object(sys, "argv", [str(file), *rest]),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            runpy.run_path(str(file), run_name="__main__")
        except Seen:
            return
        except SystemExit as error:
            raise Wrong(f"{name} {' '.join(rest)}: {said.getvalue()}") from error
    raise Wrong(f"{name} has read no words")


def _modules(name: str) -> Iterator[Path]:
    path = name.replace(".", "/")
    for root in (ROOT, ROOT / "src"):
        yield root / f"{path}.py"
        yield root / path / "__main__.py"


def ip(words: Sequence[str]) -> None:
    """iproute's, on links, addresses, routes and namespaces; what is to run within one is looked at."""
    rest = words[2:] if words[:1] == ("-n",) else words
    if not rest or rest[0] not in ("link", "addr", "route", "netns"):
        raise Wrong(f"ip {' '.join(words)}: only links, addresses, routes and namespaces are known here")
    if rest[:2] == ("netns", "exec"):
        check(Command(tuple(rest[3:])))


def script(words: Sequence[str]) -> None:
    """A script that an earlier command of the page has written."""
    if len(words) != 1 or not Path(words[0]).is_file():
        raise Wrong(f"there is no script {' '.join(words)}")


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "baton": baton,
    "curl": curl,
    "ip": ip,
    "make": make,
    "pip": pip,
    "python": python,
    "sh": script,
}


def refused(command: Command, why: str) -> None:
    """For tests: the command is refused, and *why* is said."""
    with pytest.raises(Wrong, match=why):
        check(command)
