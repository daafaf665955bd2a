"""Faults: what may go wrong on an engine, when, and how often. Pure.

A fault is written ``KIND[=VALUE][,engine=P0][,phase=PHASE][,count=N][,p=0.1][,after=N]``, for example
``status=503,engine=D1,count=3`` or ``reset,phase=prefill,p=0.1``.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Phase(enum.StrEnum):
    """Where a request is on an engine, by what it asks for."""

    PREFILL = "prefill"
    DECODE = "decode"
    PLAIN = "plain"
    PROBE = "probe"


class Kind(enum.StrEnum):
    """What goes wrong; docs/lab.md has the table."""

    DELAY = "delay"
    HANG = "hang"
    HANG_AFTER_HEAD = "hang-after-head"
    REFUSE = "refuse"
    RESET = "reset"
    CUT = "cut"
    STATUS = "status"
    FRONT_STATUS = "front-status"
    CUT_STREAM = "cut-stream"
    HANG_STREAM = "hang-stream"
    ERROR_EVENT = "error-event"
    SPLIT = "split"
    NO_DONE = "no-done"
    NO_TICKET = "no-ticket"
    NO_CONNECTOR = "no-connector"
    LEASE = "lease"
    HANDSHAKE = "handshake"
    TRANSFER_FAILS = "transfer-fails"
    POOL_FULL = "pool-full"
    EOS = "eos"
    STALL = "stall"
    RESTART = "restart"
    KILL = "kill"


# Kind -> what its value is, and the value when none is given; None when it takes none.
VALUES: Mapping[Kind, tuple[str, float] | None] = {
    Kind.DELAY: ("seconds", 1.0),
    Kind.HANG: None,
    Kind.HANG_AFTER_HEAD: None,
    Kind.REFUSE: None,
    Kind.RESET: None,
    Kind.CUT: None,
    Kind.STATUS: ("status", 500),
    Kind.FRONT_STATUS: ("status", 503),
    Kind.CUT_STREAM: ("events", 2),
    Kind.HANG_STREAM: ("events", 2),
    Kind.ERROR_EVENT: ("events", 2),
    Kind.SPLIT: ("bytes", 1),
    Kind.NO_DONE: None,
    Kind.NO_TICKET: None,
    Kind.NO_CONNECTOR: None,
    Kind.LEASE: ("seconds", 1.0),
    Kind.HANDSHAKE: ("seconds", 5.0),
    Kind.TRANSFER_FAILS: None,
    Kind.POOL_FULL: None,
    Kind.EOS: None,
    Kind.STALL: ("seconds", 5.0),
    Kind.RESTART: ("seconds", 0.0),
    Kind.KILL: None,
}

OF_ENGINE = frozenset({Kind.REFUSE, Kind.POOL_FULL, Kind.NO_CONNECTOR})
"""True of an engine as a whole while they stand, not of one request."""


class BadFault(ValueError):
    """A fault that cannot be read; the message says why and what would be right."""


@dataclass(slots=True)
class Fault:
    """One fault, and how much of it is left.

    Attributes:
        kind: what goes wrong.
        value: how much (:data:`VALUES`).
        engine: the name of the only engine it is for; None for all.
        phase: the only phase it is for; None for all but probes.
        count: how often it still happens; None without end.
        p: its probability.
        after: how many requests pass before.
        fired: how often it has happened.
    """

    kind: Kind
    value: float = 0.0
    engine: str | None = None
    phase: Phase | None = None
    count: int | None = None
    p: float = 1.0
    after: int = 0
    fired: int = 0

    @classmethod
    def parse(cls, spec: str) -> Fault:
        """Read the words of a fault.

        Raises:
            BadFault: they are off.
        """
        first, *rest = [part.strip() for part in spec.split(",")]
        name, _, given = first.partition("=")
        fields: dict[str, Any] = {"kind": name}
        if given:
            fields["value"] = given
        for part in rest:
            key, mark, value = part.partition("=")
            if not mark or key == "kind":
                raise BadFault(f"{part!r} in the fault {spec!r} is not KEY=VALUE")
            fields[key] = value
        return cls.of(fields, spec)

    @classmethod
    def of(cls, fields: Mapping[str, Any], spec: str | None = None) -> Fault:
        """From the fields of a JSON object.

        Raises:
            BadFault: they are off.
        """
        spec = spec or str(dict(fields))
        unknown = set(fields) - {"kind", "value", "engine", "phase", "count", "p", "after"}
        if unknown:
            raise BadFault(f"{min(unknown)!r} in the fault {spec!r} is unknown: engine, phase, count, p or after")
        try:
            kind = Kind(fields.get("kind", ""))
        except ValueError:
            kinds = ", ".join(Kind)
            raise BadFault(f"{fields.get('kind')!r} is not a kind of fault: one of {kinds}") from None
        if fields.get("value") is not None and VALUES[kind] is None:
            raise BadFault(f"the fault {kind} takes no value, but {spec!r} has one")
        default = VALUES[kind]
        try:
            made = cls(
                kind,
                float(fields.get("value") or (default[1] if default else 0.0)),
                fields.get("engine"),
                None if fields.get("phase") is None else Phase(fields["phase"]),
                None if fields.get("count") is None else int(fields["count"]),
                float(fields.get("p", 1.0)),
                int(fields.get("after", 0)),
            )
        except (ValueError, TypeError) as error:
            raise BadFault(f"the fault {spec!r} cannot be read: {error}") from None
        if not 0 <= made.p <= 1 or made.value < 0 or made.after < 0:
            raise BadFault(f"the fault {spec!r} has a number that cannot be")
        return made

    def as_dict(self) -> dict[str, Any]:
        return {
            "kind": str(self.kind),
            "value": self.value,
            "engine": self.engine,
            "phase": None if self.phase is None else str(self.phase),
            "count": self.count,
            "p": self.p,
            "after": self.after,
            "fired": self.fired,
        }

    def concerns(self, engine: str, phase: Phase) -> bool:
        if self.engine not in (None, engine):
            return False
        return self.phase is phase or (self.phase is None and phase is not Phase.PROBE)


NOTHING: Mapping[Kind, float] = {}


@dataclass
class Faults:
    """The faults of a lab.

    Args:
        seed: of those that happen with a probability.
    """

    seed: int = 0
    standing: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311

    def set(self, faults: Iterable[Fault]) -> None:
        self.standing = list(faults)
        self._random.seed(self.seed)

    def draw(self, engine: str, phase: Phase) -> Mapping[Kind, float]:
        """What happens to one request on *engine*: kinds and their values."""
        if not self.standing:
            return NOTHING
        drawn: dict[Kind, float] = {}
        for fault in self.standing:
            if fault.kind in OF_ENGINE or not fault.concerns(engine, phase) or fault.count == 0:
                continue
            if fault.after:
                fault.after -= 1
                continue
            if fault.p < 1 and self._random.random() >= fault.p:
                continue
            if fault.count is not None:
                fault.count -= 1
            fault.fired += 1
            drawn[fault.kind] = fault.value
        return drawn

    def stands(self, kind: Kind, engine: str) -> bool:
        """Whether a fault of a whole engine stands."""
        return any(fault.kind is kind and fault.engine in (None, engine) for fault in self.standing)
