"""When bytes go to their socket: at once, or, when much is going on, together at the end of a turn of the loop.

A write wakes whoever reads, on another core, and waking is a third of what a request costs. Who is woken once for
eight requests works through all of them. When little is going on nobody waits for a turn to end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

Buffer = bytes | memoryview
BUSY = 5
"""So many at once are much."""


class Outbox:
    """The writes of one server, or of one pool of connections, in their order."""

    __slots__ = ("_pending",)

    def __init__(self) -> None:
        self._pending: list[tuple[asyncio.Transport, Sequence[Buffer]]] = []

    def write(self, transport: asyncio.Transport, data: Sequence[Buffer], busy: int) -> None:
        """Write *data*, in pieces; *busy* says how many others are at it."""
        if self._pending:
            self._pending.append((transport, data))
        elif busy < BUSY:
            _write(transport, data)
        else:
            asyncio.get_running_loop().call_soon(self.flush)
            self._pending.append((transport, data))

    def flush(self) -> None:
        """Write everything now: before a connection is closed, for one."""
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                _write(transport, data)


def _write(transport: asyncio.Transport, data: Sequence[Buffer]) -> None:
    if len(data) == 1:
        transport.write(data[0])
    else:
        transport.writelines(data)
