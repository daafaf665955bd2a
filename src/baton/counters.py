"""Counters of a server, read off its ``/metrics``. Pure.

Line by line, without a parser of the format: an engine has a thousand lines, of which a dozen matter, and a parser
takes a hundred times as long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator


def samples(text: bytes, names: Container[bytes]) -> Iterator[tuple[bytes, float]]:
    """Name and value of every sample in *text* that has one of *names*, whatever its labels."""
    for line in text.split(b"\n"):
        name = line.partition(b"{")[0].partition(b" ")[0]
        if name in names:
            with contextlib.suppress(ValueError, IndexError):
                yield name, float(line.rpartition(b"}")[2].split()[0 if b"}" in line else 1])


def total(text: bytes, name: bytes) -> float | None:
    """The sum over all labels of one sample in *text*; None when it has none."""
    values = [value for _, value in samples(text, (name,))]
    return sum(values) if values else None
