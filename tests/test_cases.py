"""The table of cases names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from bench.topologies import topologies

TESTS = Path(__file__).parent
NAMED = re.compile(r"`(?P<file>[\w/]*\.py)?(?:::(?P<name>\w+))?`")


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


ROWS = [line for line in (TESTS / "CASES.md").read_text().splitlines() if re.match(r"\| [A-G]\d\d", line)]


@pytest.mark.parametrize("line", ROWS, ids=[line[2:5] for line in ROWS])
def test_every_test_that_a_row_names_exists(line: str) -> None:
    check(line)


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


def test_the_table_has_all_its_rows() -> None:
    assert len(ROWS) >= 50
