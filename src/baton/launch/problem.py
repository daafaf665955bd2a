"""What is known to be wrong before anything is started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that would make a start fail, with how to mend it.

    Attributes:
        what: one line.
        words: whether the words on the command line are at fault (exit code 2) and not the machine (1).
    """

    what: str
    words: bool = False
