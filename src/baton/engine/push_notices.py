"""What a prefill server says to decode servers of registrations, beside vLLM's notice that a push is complete. Pure.

vLLM's notices (0.32, nixl/push_worker.py, ``_get_new_notifs``) say how many have pushed and not who, so that one which
comes twice counts twice. Ours name the rank that speaks.
"""

from __future__ import annotations

from dataclasses import dataclass

_NO, _STILL = b"BATON-NO:", b"BATON-STILL:"


@dataclass(frozen=True)
class No:
    """One rank of the prefill server won't push, or not any more: nothing of it is written to from then on.

    Attributes:
        request_id: as the decode server registered it.
        ranks: tensor parallel size of the prefill server.
        rank: who says so, by pipeline and tensor parallel rank.
    """

    request_id: str
    ranks: int
    rank: str

    def encode(self) -> bytes:
        return _NO + f"{self.request_id}:{self.ranks}:{self.rank}".encode()

    def as_completion(self) -> bytes:
        """vLLM's notice that this rank's part is over."""
        return f"{self.request_id}:{self.ranks}".encode()


@dataclass(frozen=True)
class Still:
    """A push that was cancelled is under way: it is completed, and blocks may not be anybody else's before."""

    request_id: str

    def encode(self) -> bytes:
        return _STILL + self.request_id.encode()


def read(notice: bytes) -> No | Still | None:
    """What *notice* says; None when it is none of these."""
    if notice.startswith(_STILL):
        return Still(notice.removeprefix(_STILL).decode(errors="replace"))
    if not notice.startswith(_NO):
        return None
    request_id, *more = notice.removeprefix(_NO).decode(errors="replace").rsplit(":", 2)
    if len(more) != 2 or not (more[0].isascii() and more[0].isdigit()):
        return None
    return No(request_id, int(more[0]), more[1])
