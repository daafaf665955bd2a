"""How long the two sides of a push wait for each other. Pure: the launcher checks what the engine will obey."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PushBounds:
    """How long each side waits for the other, in seconds.

    Attributes:
        answer_seconds: a decode server, for the answer to a cancellation, until it frees the blocks unanswered.
        stall_seconds: a prefill server that does nothing for longer has stood still and trusts no registration.
    """

    answer_seconds: float = 30.0
    stall_seconds: float = 10.0

    @classmethod
    def read(cls, get: Callable[[str, Any], Any]) -> PushBounds:
        """From ``push_answer_seconds`` and ``push_stall_seconds`` in kv_connector_extra_config, by *get*.

        Raises:
            ValueError: one is no positive number, or blocks would be freed that are still written to.
        """
        made = {}
        for name, default in (("answer_seconds", cls.answer_seconds), ("stall_seconds", cls.stall_seconds)):
            value = get(f"push_{name}", default)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ValueError(f"push_{name} {value!r} is not a number of seconds above 0")
            made[name] = float(value)
        if made["answer_seconds"] < 2 * made["stall_seconds"]:
            raise ValueError(
                f"push_answer_seconds {made['answer_seconds']:g} must be twice push_stall_seconds "
                f"{made['stall_seconds']:g} or more: a prefill server that stands still must know it before its "
                "decode servers free what it writes to"
            )
        return cls(**made)
