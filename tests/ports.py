"""Ports for servers that are started a while after their ports were chosen."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_given: set[int] = set()
"""Ports that were given out before: whoever was given one may not listen yet."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, all different, and none that was given out before.

    They lie below those that the kernel hands out by itself: until a server takes its port, seconds may pass in which
    any connection, or a neighbour that asks for port 0, could be given it.
    """
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    found: list[int] = []
    if len(_given) > (end - FIRST) // 2:
        # The first of them are long taken, or free again.
        _given.clear()
    for port in random.sample(range(FIRST, end), end - FIRST):
        if port in _given:
            continue
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == count:
            _given.update(found)
            return found
    raise RuntimeError(f"{count} free ports were asked for, between {FIRST} and {end} there are {len(found)}")


def free_port() -> int:
    """One of them."""
    return free_ports(1)[0]


def free_range(count: int) -> int:
    """The first of *count* free ports in a row."""
    while True:
        first = free_port()
        rest = range(first + 1, first + count)
        if _given.intersection(rest):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in rest:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            _given.update(rest)
            return first
