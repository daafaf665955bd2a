"""What a prefill server says to decode servers of registrations, beside vLLM's notice that a push is complete. Pure.

vLLM's notices (0.32, nixl/push_worker.py, ``_get_new_notifs``) say how many have pushed and not who, so that one which
comes twice counts twice. Ours name the rank that speaks.
"""

from __future__ import annotations

from dataclasses import dataclass

_NO, _DONE, _STILL = b"BATON-NO:", b"BATON-DONE:", b"BATON-STILL:"


@dataclass(frozen=True)
class _Over:
    """One rank of the prefill server writes nothing (any more) for a registration.

    Attributes:
        request_id: as the decode server registered it.
        ranks: tensor parallel size of the prefill server.
        rank: who says so, by pipeline and tensor parallel rank.
    """

    request_id: str
    ranks: int
    rank: str

    def _said(self) -> bytes:
        return f"{self.request_id}:{self.ranks}:{self.rank}".encode()


@dataclass(frozen=True)
class No(_Over):
    """It won't push, or not any more: said in the place of vLLM's notice."""

    def encode(self) -> bytes:
        return _NO + self._said()

    def as_completion(self) -> bytes:
        """vLLM's notice that this rank's part is over."""
        return f"{self.request_id}:{self.ranks}".encode()


@dataclass(frozen=True)
class Done(_Over):
    """It has pushed, and vLLM's notice of that has gone out; it may be lost. Said to who asks again."""

    def encode(self) -> bytes:
        return _DONE + self._said()


@dataclass(frozen=True)
class Still:
    """A push that was cancelled is under way: it is completed, and blocks may not be anybody else's before."""

    request_id: str

    def encode(self) -> bytes:
        return _STILL + self.request_id.encode()


Said = No | Done | Still


def read(notice: bytes) -> Said | None:
    """What *notice* says; None when it is none of these."""
    if notice.startswith(_STILL):
        return Still(notice.removeprefix(_STILL).decode(errors="replace"))
    for kind, prefix in ((No, _NO), (Done, _DONE)):
        if notice.startswith(prefix):
            request_id, *more = notice.removeprefix(prefix).decode(errors="replace").rsplit(":", 2)
            if len(more) == 2 and more[0].isascii() and more[0].isdigit():
                return kind(request_id, int(more[0]), more[1])
    return None
