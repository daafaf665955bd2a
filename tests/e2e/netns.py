"""Hosts on this machine: network namespaces, each with an address of its own, on one bridge.

What they send each other crosses a pair of virtual Ethernet devices, which can be cut, slowed down and filtered. The
machine itself is on the bridge too, so that a test talks to all of them. It takes root and Linux's `ip` and `tc`; where
they don't do, :class:`NoNamespaces` says why.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIX = "bn"
"""Names are bn<pid of the tests>-<host>; a device's may have 15 letters."""

NAMESPACES = Path("/run/netns")


class NoNamespaces(RuntimeError):
    """This machine makes none; the message says why."""


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        name: within its network.
        address: on the bridge.
        namespace: its name for `ip netns`.
        link: the bridge's end of its cable.
    """

    name: str
    address: str
    namespace: str
    link: str

    def words(self, *argv: str) -> tuple[str, ...]:
        """The command that runs *argv* there."""
        return ("ip", "netns", "exec", self.namespace, *argv)

    def cut(self) -> None:
        """Pull its cable out."""
        _do("ip", "link", "set", self.link, "down")

    def join(self) -> None:
        """Plug it in again."""
        _do("ip", "link", "set", self.link, "up")

    @contextlib.contextmanager
    def slow(self, megabits: float) -> Iterator[None]:
        """It sends and gets no more than so many megabits a second."""
        shape = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "16kb", "latency", "500ms")
        _do("tc", "qdisc", "add", "dev", self.link, *shape)
        _do(*self.words("tc", "qdisc", "add", "dev", "eth0", *shape))
        try:
            yield
        finally:
            _do("tc", "qdisc", "del", "dev", self.link, "root")
            _do(*self.words("tc", "qdisc", "del", "dev", "eth0", "root"))

    @contextlib.contextmanager
    def blocked(self, port: int) -> Iterator[None]:
        """What it sends from this TCP port never arrives, as behind a firewall; what runs on it still reaches the port.

        It goes to a neighbour that does not exist: the kernel here may lack all that filters packets.
        """
        inside = ("ip", "-n", self.namespace)
        nobody = f"{self.address.rpartition('.')[0]}.253"
        rule = ("sport", str(port), "ipproto", "tcp", "table", "100")
        _do(*inside, "neigh", "replace", nobody, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")
        _do(*inside, "route", "replace", "default", "via", nobody, "dev", "eth0", "table", "100")
        _do(*inside, "rule", "add", *rule)
        try:
            yield
        finally:
            _do(*inside, "rule", "del", *rule)

    def crossed(self) -> int:
        """Bytes that have left it for the others, or come from them."""
        counts = Path("/sys/class/net") / self.link / "statistics"
        return sum(int((counts / name).read_text()) for name in ("rx_bytes", "tx_bytes"))


@contextlib.contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Hosts of these names, by name; whatever runs on them in the end is killed.

    Raises:
        NoNamespaces: they cannot be made here.
    """
    remove_leftovers()
    mine = f"{PREFIX}{os.getpid()}"
    try:
        yield _made(mine, names)
    finally:
        _remove(mine)


def remove_leftovers() -> None:
    """Remove what tests have left that were killed."""
    links = Path("/sys/class/net")
    found = [*(links.iterdir() if links.exists() else ()), *(NAMESPACES.iterdir() if NAMESPACES.exists() else ())]
    for pid in {match[1] for each in found if (match := re.fullmatch(rf"{PREFIX}(\d+)(-.*)?", each.name))}:
        if not Path(f"/proc/{pid}").exists():
            _remove(f"{PREFIX}{pid}")


def _made(mine: str, names: Sequence[str]) -> dict[str, Host]:
    if os.geteuid() != 0:
        raise NoNamespaces("it takes root to make network namespaces")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NoNamespaces(f"there is no `{program}` here: install iproute2")
    net = _free_net()
    hosts = {}
    try:
        _do("ip", "link", "add", mine, "type", "bridge")
        _do("ip", "addr", "add", f"{net}.254/24", "dev", mine)
        _do("ip", "link", "set", mine, "up")
        for number, name in enumerate(names, start=1):
            host = hosts[name] = Host(name, f"{net}.{number}", f"{mine}-{name}", f"{mine}-{number}")
            _do("ip", "netns", "add", host.namespace)
            _do("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _do("ip", "link", "set", host.link, "master", mine, "up")
            inside = ("ip", "-n", host.namespace)
            _do(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _do(*inside, "link", "set", "eth0", "up")
            _do(*inside, "link", "set", "lo", "up")
            # As on a host that is connected to more than its peers: vLLM asks for the way to the outside.
            _do(*inside, "route", "add", "default", "via", f"{net}.254")
    except subprocess.CalledProcessError as error:
        raise NoNamespaces(f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}") from error
    return hosts


def _free_net() -> str:
    """The first three numbers of a network that this machine has no way to yet."""
    known = _do("ip", "-4", "route")
    start = os.getpid()
    nets = (f"10.{64 + number % 128}.{number // 128 % 256}" for number in range(start, start + 1000))
    return next(net for net in nets if f"{net}." not in known)


def _remove(mine: str) -> None:
    """Kill what runs in the namespaces of *mine*, and remove them with all devices."""
    for namespace in sorted(NAMESPACES.glob(f"{mine}-*")) if NAMESPACES.exists() else ():
        _kill(namespace.name)
        _try("ip", "netns", "del", namespace.name)
    for link in sorted(path for path in Path("/sys/class/net").iterdir() if re.fullmatch(rf"{mine}(-.*)?", path.name)):
        _try("ip", "link", "del", link.name)


def _kill(namespace: str) -> None:
    deadline = time.monotonic() + 20
    while pids := [int(pid) for pid in _try("ip", "netns", "pids", namespace).split()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _do(*argv: str) -> str:
    return subprocess.run(argv, check=True, capture_output=True, text=True, timeout=30).stdout


def _try(*argv: str) -> str:
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=30).stdout
