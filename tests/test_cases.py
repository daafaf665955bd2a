"""The table of cases has a row for every kind, and names tests that exist."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest
from bench.topologies import topologies

TESTS = Path(__file__).parent
NAMED = re.compile(r"`(?P<file>[\w/]*\.py)?(?:::(?P<name>\w+))?`")

KINDS = (
    *("A01", "A02", "A03", "A04", "A06", "A07", "A08", "A09", "A10", "A11", "A12", "A13", "A14", "A15", "A17", "A18"),
    *("B01", "B02", "B03", "B04", "B05", "B07", "B08", "B09", "B10", "B11", "B13"),
    *("C01", "C02", "C03", "C04", "C06", "C07", "C09", "C10", "C11", "C12", "C13", "C14", "C15", "C16", "C17", "C18"),
    *("C19", "D01", "D02", "D04", "D05", "D06", "D07", "D09", "D10", "D11", "D13"),
    *("E01", "E02", "E03", "E04", "E05", "E06", "E07", "E08", "E09", "E11", "E12"),
    *("F01", "F03", "F04", "F05", "F06", "F08", "F09", "F10"),
    *("G02", "G03", "G04", "G05", "G06", "G07", "G08", "G09", "G10"),
)
"""All that were known; numbers that are missing stand for nothing."""


def named(line: str) -> list[tuple[str, str | None]]:
    """The files and tests that a row names; a test without a file is in the one named before it."""
    found: list[tuple[str, str | None]] = []
    file = ""
    for match in NAMED.finditer(line):
        if match["file"] is None and match["name"] is None:
            continue
        file = match["file"] or file
        found.append((file, match["name"]))
    return found


LINES = (TESTS / "CASES.md").read_text().splitlines()
ROWS = [line for line in LINES if line.startswith("| ") and not re.match(r"\| (kind|---) ", line)]


def kinds(line: str) -> list[str]:
    """The kinds that a row is of."""
    return re.findall(r"\b[A-GS]\d\d\b", line.split("|")[1])


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line.split("|")[1].strip()[:40])
def test_every_test_that_a_row_names_exists(line: str) -> None:
    check(line)


@pytest.mark.parametrize("line", ROWS, ids=lambda line: line.split("|")[1].strip()[:40])
def test_a_row_has_three_cells_and_says_what_is_done(line: str) -> None:
    _, kind, here, test, _ = re.split(r"(?<!\\)\|", line)
    assert kind.strip()
    assert here.strip() or test.strip()


def test_every_kind_has_a_row() -> None:
    has = {kind for line in ROWS for kind in kinds(line)}
    assert set(KINDS) - has == set()
    assert {kind for kind in has if kind[0] != "S"} <= set(KINDS)


def test_every_table_has_a_head() -> None:
    for before, line in itertools.pairwise(LINES):
        if line.startswith("|") and not before.startswith("|"):
            assert line == "| kind | here | test |"


def test_rows_stand_under_the_letter_that_they_are_of() -> None:
    letter = ""
    for line in LINES:
        if line.startswith("#"):
            found = re.search(r"\(([A-GS])\)$", line)
            letter = found[1] if found else ""
        elif letter and line in ROWS:
            assert letter in {kind[0] for kind in kinds(line)}, line


def test_every_topology_that_is_measured_names_a_test_that_exists() -> None:
    for topology in topologies():
        line = f"`{topology.test.split(' ')[0]}`"
        assert named(line), line
        check(line)


def check(line: str) -> None:
    for file, name in named(line):
        path = TESTS.parent / file if file.startswith("bench/") else TESTS / file
        if not path.exists():
            path = TESTS / "e2e" / file
        assert path.exists(), file
        if name is not None:
            defined = {node.name for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")}
            assert name in defined, f"{file}::{name}"
