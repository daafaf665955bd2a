"""What the doctor says: one finding a check and thing looked at. Values only."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class Verdict(enum.StrEnum):
    """How it is with something."""

    OK = "ok"
    NOTE = "note"
    """It may be what you want, or not."""
    BAD = "bad"
    SKIPPED = "skipped"
    """It could not be looked at, and the finding says why."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: its name, as docs/operations.md lists it.
        subject: what was looked at: ``P0``, ``P0 to D1``, ``this host``.
        verdict: how it is.
        what: what was seen, in plain words, with the value.
        remedy: what to do; empty when all is well.
    """

    check: str
    subject: str
    verdict: Verdict
    what: str
    remedy: str = ""


def ok(check: str, subject: str, what: str) -> Finding:
    return Finding(check, subject, Verdict.OK, what)


def note(check: str, subject: str, what: str, remedy: str) -> Finding:
    return Finding(check, subject, Verdict.NOTE, what, remedy)


def bad(check: str, subject: str, what: str, remedy: str) -> Finding:
    return Finding(check, subject, Verdict.BAD, what, remedy)


def skipped(check: str, subject: str, what: str) -> Finding:
    return Finding(check, subject, Verdict.SKIPPED, what)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something is bad."""
    return int(any(each.verdict is Verdict.BAD for each in findings))
