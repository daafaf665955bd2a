"""The ticket: what a prefill server hands out so that a decode server can fetch the KV cache.

It is vLLM's ``kv_transfer_params``. Baton reads one thing in it and passes everything on
as it came, since its keys change from version to version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.cluster import TransferMode
from baton.hand_over import TICKET_KEY, push_params
from baton.proxy.engine_info import WORDS, EngineInfo

TRUSTED_KEYS = (TICKET_KEY, "ec_transfer_params")
"""What an engine believes without asking: it names hosts, ports and blocks. Only the proxy may say it."""

CONVERSATION_KEY = "conversation_id"
"""Which conversation a request belongs to, for the proxy alone: no engine knows the field."""

DOORS = ("vllm_xargs", "extra_args", "sampling_params")
"""Objects within a body whose keys an engine takes for the same."""


@dataclass(slots=True)
class Ticket:
    """A right to pull one request's KV cache, once, while its lease lasts.

    Attributes:
        params: vLLM's parameters, opaque.
        given_at: when it was handed out, on the proxy's monotonic clock, in seconds.
        giver: the id of the instance that gave it; empty for one that is made here.
    """

    params: Mapping[str, Any]
    given_at: float
    giver: str = ""

    @classmethod
    def from_answer(cls, answer: Any, now: float) -> Ticket | None:
        """The ticket in a prefill server's answer, or None when it gave none.

        An engine without a connector leaves the key out or null; one whose request ended by
        anything but length gives none either, as it has freed the blocks.
        """
        params = answer.get(TICKET_KEY) if isinstance(answer, dict) else None
        if not isinstance(params, dict) or not params.get("do_remote_prefill"):
            return None
        return cls(params, now)

    @property
    def engine_id(self) -> Any:
        """The prefill server that gave it, or that it was made for."""
        return self.params.get("remote_engine_id")

    @property
    def pushed(self) -> bool:
        """Whether its giver moves the blocks itself (write mode)."""
        return self.params.get("transfer_mode") == WORDS[TransferMode.WRITE]


def push_ticket(info: EngineInfo, rank: int, request_id: str, now: float) -> Ticket:
    """A decode leg's ticket in write mode, made before prefill has answered: to be pushed to by *info*'s *rank*.

    Args:
        request_id: of both legs.
    """
    port = info.side_channel_port + rank
    params = push_params(
        info.id_of_rank(rank), info.side_channel_host, port, request_id, tp_size=info.tp_size, pp_size=info.pp_size
    )
    return Ticket(params, now)


def holds_trusted(body: Mapping[str, Any]) -> bool:
    """Whether a client's body says what only the proxy may say."""
    for key in TRUSTED_KEYS:
        if key in body:
            return True
    for door in DOORS:
        if door in body:
            inner = body[door]
            if isinstance(inner, dict) and holds_trusted(inner):
                return True
    return False


def without_trusted(body: Mapping[str, Any]) -> dict[str, Any]:
    """A client's body without it."""
    return {
        key: without_trusted(value) if key in DOORS and isinstance(value, dict) else value
        for key, value in body.items()
        if key not in TRUSTED_KEYS
    }
