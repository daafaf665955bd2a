"""The pages of the docs: their fenced blocks, what stands in code spans, and the commands in a block."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATORS = ";|&<>()"


@dataclass(frozen=True)
class Block:
    """What stands between two fences, or indented.

    Attributes:
        page: from the root of the repository.
        line: the first fence's, from 1.
        language: the word after the fence; empty without one.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Span:
    """Code within a line of text."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} `{self.text}`"


@dataclass(frozen=True)
class Command:
    """One program and its words.

    Attributes:
        environ: what was assigned before it.
        piped: whether it reads what the one before it writes.
    """

    words: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    piped: bool = False


def blocks_of(page: Path) -> list[Block]:
    name = str(page.relative_to(ROOT))
    return [
        Block(name, (token.map or [0])[0] + 1, token.info.strip(), token.content)
        for token in MarkdownIt().parse(page.read_text())
        if token.type in ("fence", "code_block")
    ]


def spans_of(page: Path) -> Iterator[Span]:
    name = str(page.relative_to(ROOT))
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        for child in token.children or ():
            if child.type == "code_inline":
                yield Span(name, (token.map or [0])[0] + 1, child.content.replace("\\|", "|"))


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SPANS = [span for page in PAGES for span in spans_of(page)]


def commands_in(text: str) -> list[Command]:
    """The commands of a shell text, in order. What they write to and read from is left out.

    Raises:
        ValueError: a quotation has no end, or it is more than plain commands.
    """
    made: list[Command] = []
    for words in _lines(text):
        piped = False
        for part, operator in _parts(words):
            if part[:1] == ["do"]:
                del part[0]
            if part[:1] == ["for"] or part == ["done"]:
                # What stands between them is looked at once, whatever the loop runs over.
                continue
            environ: dict[str, str] = {}
            while part and re.match(r"[A-Za-z_]\w*=", part[0]):
                name, _, value = part.pop(0).partition("=")
                environ[name] = value
            if part or environ:
                made.append(Command(tuple(part), environ, piped))
            piped = operator == "|"
    return made


def _lines(text: str) -> Iterator[list[str]]:
    """The words of each command line; a quotation and a backslash go on in the next one."""
    waiting = ""
    for line in text.splitlines():
        waiting += line
        if waiting.endswith("\\"):
            waiting = waiting[:-1] + " "
            continue
        try:
            words = _words(waiting)
        except ValueError:
            waiting += "\n"
            continue
        waiting = ""
        if words:
            yield words
    if waiting:
        raise ValueError(f"this has no end: {waiting!r}")


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=OPERATORS)
    lexer.whitespace_split = True
    return list(lexer)


def _parts(words: list[str]) -> Iterator[tuple[list[str], str]]:
    """*words* cut at operators, each part with the operator behind it, without redirections."""
    part: list[str] = []
    rest = iter(words)
    for word in rest:
        if not word or set(word) - set(OPERATORS):
            part.append(word)
        elif word in (">", ">>", "<"):
            next(rest)
        elif word in ("|", "||", "&&", ";", "&"):
            yield part, word
            part = []
        else:
            raise ValueError(f"{word!r} is more than a plain command: {' '.join(words)}")
    yield part, ""
