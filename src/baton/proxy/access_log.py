"""One line a request: who asked what, and what came of it. No bodies, no queries, no headers."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

logger = logging.getLogger("baton.proxy")

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
        self._told = False
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
        retries: int = 0,
    ) -> None:
        """One request; *first_event_seconds* is 0 for what was no stream, *retries* for what did at first."""
        now = time.time()
        second = int(now)
        if second != self._second:
            self._second = second
            self._stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        again = f" retries={retries}" if retries else ""
        first = f" ttft={first_event_seconds:.4f}" if first_event_seconds else ""
        try:
            self._stream.write(
                f"{self._stamp}.{int((now - second) * 1000):03d}Z {method} {_shown(path)} {status} {seconds:.4f}"
                f" id={request_id} prefill={prefill} decode={decode}{first}{again}\n"
            )
        except OSError as error:
            self._lost(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def close(self) -> None:
        self.flush()
        if self._stream is not sys.stdout:
            with suppress(OSError):
                self._stream.close()

    def _lost(self, error: OSError) -> None:
        """A full disk costs lines of the log, and no requests."""
        if not self._told:
            self._told = True
            logger.warning("the access log cannot be written: %s; lines are lost", error.strerror or error)


def _shown(path: str) -> str:
    """A path that cannot break the line or the terminal."""
    return path if path.isascii() and path.isprintable() else path.encode("unicode_escape").decode()
