"""One line a request: who asked what, and what came of it. No bodies, no queries, no headers."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO

FLUSH_BYTES = 32 << 10


class AccessLog:
    """Lines to a file, gathered and written together: a write a line would cost more than the line.

    Args:
        path: of the file, which is added to; ``-`` for standard output.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._stream: IO[str] = sys.stdout
        if path != "-":
            self._stream = Path(path).open("a", buffering=FLUSH_BYTES)  # noqa: SIM115 - closed by close()
        self._second = 0
        self._stamp = ""

    def line(
        self,
        method: str,
        path: str,
        status: int,
        seconds: float,
        *,
        request_id: str = "-",
        prefill: str = "-",
        decode: str = "-",
        first_event_seconds: float = 0.0,
    ) -> None:
        """One request; *first_event_seconds* is 0 for what was no stream."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        first = f" ttft={first_event_seconds:.4f}" if first_event_seconds else ""
        self._stream.write(
            f"{self._stamp}.{int((now - second) * 1000):03d}Z {method} {_shown(path)} {status} {seconds:.4f}"
            f" id={request_id} prefill={prefill} decode={decode}{first}\n"
        )

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        self.flush()
        if self._stream is not sys.stdout:
            self._stream.close()


def _shown(path: str) -> str:
    """A path that cannot break the line or the terminal."""
    return path if path.isascii() and path.isprintable() else path.encode("unicode_escape").decode()
