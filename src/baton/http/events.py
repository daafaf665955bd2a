"""Server-sent events in a byte stream: where one ends, whatever way the stream was cut."""

from __future__ import annotations

from collections.abc import Iterator

_CLEAN_ENDS = (b"\n\n", b"\r\n\r\n")
_TAIL = 3


class EventBuffer:
    """Cuts a stream of server-sent events into runs of whole ones.

    Lines end with LF or CRLF. Nothing of an event is given before all of it is there, so that whoever writes
    between two runs never splits one.
    """

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def push(self, piece: bytes) -> bytes:
        """The events that *piece* completes, as they came; empty when it completes none."""
        if not self._pieces:
            # A server writes an event at a time, mostly.
            if piece.endswith(_CLEAN_ENDS):
                return piece
            end = _last_end(piece)
            self._pieces.append(piece[end:])
            return piece[:end]
        # A blank line may stand across pieces: look from a little before this one.
        before = _tail(self._pieces)
        end = _last_end(before + piece) - len(before)
        if end <= 0:
            self._pieces.append(piece)
            return b""
        whole = b"".join(self._pieces) + piece[:end]
        self._pieces = [piece[end:]] if end < len(piece) else []
        return whole

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not whole."""
        return b"".join(self._pieces)


def split(run: bytes) -> Iterator[bytes]:
    """The events of a run of whole ones, each with its blank line."""
    if b"\r" not in run:
        for event in run.split(b"\n\n")[:-1]:
            yield event + b"\n\n"
        return
    start = 0
    while start < len(run):
        end = _first_end(run, start)
        yield run[start:end]
        start = end


def last_of(run: bytes) -> bytes:
    """The last event of a run of whole ones; empty for an empty run."""
    if run.endswith(b"\r\n"):
        return list(split(run))[-1]
    before = run.rfind(b"\n\n", 0, -2)
    last = run[before + 2 :] if before >= 0 else run
    return last if b"\r" not in last else list(split(run))[-1]


def data_of(event: bytes) -> bytes:
    """The data of one event: its ``data`` lines, joined by LF."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join([line[6:] if line[5:6] == b" " else line[5:] for line in lines])


def with_data(event: bytes, data: bytes) -> bytes:
    """*event* with other data, in one line; what it says besides stays."""
    kept = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*kept, b"data: " + data]) + b"\n\n"


def _last_end(data: bytes) -> int:
    """Where the last whole event ends; 0 when none does."""
    lf, crlf = data.rfind(b"\n\n"), data.rfind(b"\n\r\n")
    return max(lf + 2 if lf >= 0 else 0, crlf + 3 if crlf >= 0 else 0)


def _first_end(data: bytes, start: int) -> int:
    ends = [at + size for mark, size in ((b"\n\n", 2), (b"\n\r\n", 3)) if (at := data.find(mark, start)) >= 0]
    return min(ends, default=len(data))


def _tail(pieces: list[bytes]) -> bytes:
    """The last bytes before a new piece, at most as many as a blank line can have before its last."""
    tail = b""
    for piece in reversed(pieces):
        tail = piece[-_TAIL:] + tail
        if len(tail) >= _TAIL:
            break
    return tail[-_TAIL:]
