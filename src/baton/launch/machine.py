"""The doctor's look at this host: packages, NIXL and its backends, EFA, ports, memory, limits. Starts no engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import psutil

from baton.cluster import Cluster, TransferBackend
from baton.launch.commands import Command
from baton.launch.devices import EngineInstall
from baton.launch.findings import Finding, bad, note, ok, skipped
from baton.launch.ports import Claim
from baton.launch.preflight import (
    available_bytes,
    check_descriptors,
    check_device,
    check_install,
    check_ports,
    check_shared_memory,
    estimates,
    shared_memory_bytes,
)
from baton.launch.versions import known_of, untested

HERE = "this host"
CHILD_SECONDS = 60.0
LOADS_NIXL = "import nixl._api; print('loaded')"
LOADS_BACKEND = """
import sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("doctor", nixl_agent_config(backends=[sys.argv[1]]))
plugins = ", ".join(sorted(agent.plugin_list))
if sys.argv[1] not in agent.plugin_list:
    raise SystemExit(f"there is no such plugin, only {plugins}")
if sys.argv[1] not in agent.backends:
    raise SystemExit("the plugin is there and made no backend")
print("loaded")
"""


def addresses_here() -> frozenset[str]:
    """All addresses of this host."""
    return frozenset(each.address for found in psutil.net_if_addrs().values() for each in found)


@dataclass(frozen=True)
class Said:
    """What a program said.

    Attributes:
        code: its exit code; None when it was stopped after its time or is not there.
        text: its output, both streams.
    """

    code: int | None
    text: str

    @property
    def last(self) -> str:
        lines = [line.strip() for line in self.text.splitlines() if line.strip()]
        return lines[-1] if lines else "it said nothing"


Run = Callable[[Sequence[str]], Said]


def run_child(words: Sequence[str], seconds: float = CHILD_SECONDS) -> Said:
    """Run a program to its end: a library that crashes takes only that along."""
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Said(None, f"it did not end within {seconds:.0f} s")
    except OSError as error:
        return Said(None, error.strerror or str(error))
    return Said(done.returncode, f"{done.stdout}\n{done.stderr}")


def check_packages(cluster: Cluster, install: EngineInstall, nixl: str) -> Iterator[Finding]:
    """vLLM and NIXL are installed, for the right device, in versions that work."""
    problems = [*check_install(install, {}), *check_device(cluster, install)]
    for problem in problems:
        what, _, remedy = problem.what.rpartition(": ")
        yield bad("packages", HERE, what, remedy)
    if not problems:
        yield ok("packages", HERE, f"{install.distribution} {install.version} and nixl {nixl or 'of unknown version'}")
    for known, version in known_of({"vllm": install.version, "nixl": nixl}):
        say = bad if known.broken else note
        yield say("versions", HERE, f"{known.package} is {version}: {known.what}", known.remedy)
    if install.version and untested(install.version) and not known_of({"vllm": install.version}):
        yield note(
            "versions",
            HERE,
            f"vllm is {install.version}, and Baton is tested with 0.32: its hooks may be gone",
            "if an engine says HookGone at its start, install vllm 0.32",
        )


def check_nixl(backends: Sequence[str], run: Run = run_child) -> Iterator[Finding]:
    """NIXL loads, and each backend that is asked for, each in a process of its own."""
    said = run([sys.executable, "-c", LOADS_NIXL])
    if said.code != 0:
        yield bad(
            "nixl",
            HERE,
            f"`import nixl` fails{_crashed(said)}: {said.last}",
            "pip install nixl, and of nixl-cu12 and nixl-cu13 keep the one for the CUDA that is here",
        )
        return
    yield ok("nixl", HERE, "the package loads")
    for backend in backends:
        said = run([sys.executable, "-c", LOADS_BACKEND, backend])
        if said.code == 0:
            yield ok("backend", backend, "NIXL makes an agent with it")
            continue
        remedy = (
            "install libfabric 2 with the EFA provider and CUDA's runtime library, which NIXL's plugin links against"
            if backend == TransferBackend.LIBFABRIC
            else "reinstall nixl; a UCX of the system on LD_LIBRARY_PATH must not stand before the wheel's own"
        )
        yield bad("backend", backend, f"NIXL cannot use it{_crashed(said)}: {said.last}", remedy)


def check_efa(
    backends: Sequence[str], run: Run = run_child, environ: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """`fi_info -p efa` lists a provider, where LIBFABRIC is asked for."""
    if TransferBackend.LIBFABRIC not in backends:
        return
    provider = environ.get("FI_PROVIDER", "efa")
    if provider != "efa":
        yield note("efa", HERE, f"FI_PROVIDER is {provider}: the KV cache does not travel over EFA", "unset it on EFA")
        return
    if shutil.which("fi_info") is None and run is run_child:
        yield bad("efa", HERE, "there is no fi_info, libfabric's own tool", "run AWS's EFA installer on this host")
        return
    said = run(["fi_info", "-p", "efa"])
    count = said.text.count("provider: efa")
    if said.code == 0 and count:
        yield ok("efa", HERE, f"fi_info lists {count} EFA endpoints")
        return
    yield bad(
        "efa",
        HERE,
        f"`fi_info -p efa` lists no provider: {said.last}",
        "use an instance with EFA enabled, in one subnet and placement group with the others, whose security group "
        "lets its own members pass; run AWS's EFA installer",
    )


def check_limits(workers: int) -> Iterator[Finding]:
    """Files that may be open, and shared memory."""
    files = check_descriptors()
    yield from (bad("descriptors", HERE, *_split(problem.what)) for problem in files)
    if not files:
        yield ok("descriptors", HERE, "a process may open enough files")
    shared = check_shared_memory(workers)
    yield from (bad("shared memory", HERE, *_split(problem.what)) for problem in shared)
    if not shared:
        free = shared_memory_bytes()
        yield ok("shared memory", HERE, "none is needed" if free is None else f"{free / 1e6:,.0f} MB free in /dev/shm")


def check_memory_of(commands: Mapping[str, Command], *, known: bool) -> Iterator[Finding]:
    """The engines that are not up fit into what is free.

    Args:
        commands: of those engines, by name.
        known: whether what they take can be told: on CPU, with a model on this disk.
    """
    if not commands:
        yield ok("memory", HERE, f"{available_bytes() / 1e9:.1f} GB are free, and all engines are up")
        return
    if not known:
        yield skipped("memory", HERE, "what an engine takes is only known on CPU, with the model on this disk")
        return
    sizes = {name: each.total for name, each in estimates(commands).items()}
    needed, free = sum(sizes.values()), available_bytes()
    each = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in sizes.items())
    what = f"engines that are not up need about {needed / 1e9:.1f} GB ({each}), and {free / 1e9:.1f} GB are free"
    if needed <= free:
        yield ok("memory", HERE, what)
        return
    yield bad(
        "memory",
        HERE,
        what,
        "lower --kv-cache-memory-bytes, --max-num-seqs or --max-model-len, use a smaller model, or stop something",
    )


def check_ports_of(claims: Sequence[Claim]) -> Iterator[Finding]:
    """Ports of processes that are not up are free."""
    for claim in claims:
        for problem in check_ports([(claim.host, claim.port, claim.owner)]):
            yield bad("ports", claim.owner, *_split(problem.what, "; "))
    if claims and not any(check_ports((each.host, each.port, each.owner) for each in claims)):
        yield ok("ports", HERE, f"the {len(claims)} ports of what is not up are free")


def _crashed(said: Said) -> str:
    return f" (killed by signal {-said.code})" if said.code is not None and said.code < 0 else ""


def _split(what: str, at: str = ": ") -> tuple[str, str]:
    """A problem's line as what it is and what to do."""
    head, _, tail = what.rpartition(at)
    return (head, tail) if head else (what, "")
