"""What the proxy does about requests that are not handed over, and the causes that it tells apart."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class OnNoTransfer(enum.StrEnum):
    """What becomes of a request whose KV cache is not transferred, and of readiness when a pair transfers nothing.

    FAIL: not ready, and a request that gets no ticket is refused with 503.
    FALLBACK: ready; the decode server computes the prompt, also when no prefill server can be used. Counted, not said.
    WARN: ready; the decode server computes the prompt when there is no ticket. Counted and said.
    """

    FAIL = "fail"
    FALLBACK = "fallback"
    WARN = "warn"


class Cause(enum.StrEnum):
    """Why nothing was transferred."""

    NO_CONNECTOR = "no_connector"
    PARAMS_DROPPED = "params_dropped"
    PREFILL_REFUSED = "prefill_refused"
    DECODE_REFUSED = "decode_refused"
    WRONG_ENDPOINT = "wrong_endpoint"
    WRONG_ROLE = "wrong_role"
    INCOMPATIBLE = "incompatible"
    DECODE_COMPUTED = "decode_computed"
    TOO_SLOW = "too_slow"
    BROKEN = "broken"
    NO_TICKET = "no_ticket"
    NO_PREFILL = "no_prefill"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a pair, or an instance, does not hand over.

    Attributes:
        instances: their ids.
        message: for people.
    """

    cause: Cause
    instances: tuple[str, ...]
    message: str

    def said(self) -> dict[str, Any]:
        """As JSON."""
        return {"cause": self.cause, "instances": list(self.instances), "message": self.message}


class Failed(Exception):
    """A pair did not hand over; the message says which engine said what."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
