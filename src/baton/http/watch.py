"""TCP's own watch over a connection to a server whose host or network may vanish without a goodbye.

Without it nothing is ever heard of a server that was asked and is cut off: the kernel waits for an answer for ever, and
a quarter of an hour for a request's acknowledgement (Linux, tcp_retries2).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

QUIET_SECONDS = 10
PROBE_SECONDS = 5
PROBES = 3
GONE_SECONDS = QUIET_SECONDS + PROBE_SECONDS * PROBES
"""After so long without any sign a peer is gone. An engine may well be silent for longer: its kernel answers probes."""

_OPTIONS = (
    ("TCP_KEEPIDLE", QUIET_SECONDS),
    ("TCP_KEEPINTVL", PROBE_SECONDS),
    ("TCP_KEEPCNT", PROBES),
    ("TCP_USER_TIMEOUT", GONE_SECONDS * 1000),
)
"""Names are those of the socket module, which lacks some on other systems."""


def watch_peer(transport: asyncio.BaseTransport) -> None:
    """Have the connection break when its peer's host has not been heard of for :data:`GONE_SECONDS`."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
