"""The prompts of the end-to-end tests: real text, cut to exact token counts around every block boundary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.engines import BLOCK, post

TOKENS_OUT = 8

LENGTHS = (1, 2, 3, 5, 8, 13, 21, *(BLOCK * k + d for k in range(1, 8) for d in (-1, 0, 1)))

TEXTS = (
    "Count the number 1, 2, 3",
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Monday, Tuesday, Wednesday,",
    "The opposite of hot is",
    "In the beginning the universe was",
    "A recipe for bread needs flour, water and",
    "Dear Sir or Madam,",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "The three primary colours are red,",
    "Roses are red, violets are",
    "If it rains tomorrow, we will",
    "import os\nimport sys\n",
    "She opened the door and saw",
    "The largest planet of the solar system is",
    "El perro y el gato",
    "\u00c4pfel und Birnen sind",
    "\u6625\u7720\u4e0d\u899a\u6681",
    "<html><head><title>",
    "a",
    " ",
    "Q: What is the sum of 5 and 7?\nA:",
    '{"name": "Ann", "age":',
)

CHATS = (
    "Say hello.",
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "Name three animals that live in Africa, and say for each what it eats and where it sleeps at night.",
)


@dataclass(frozen=True)
class Case:
    """One request. ``name`` is the same on every server; ``body`` is for the reference."""

    name: str
    body: Mapping[str, Any]


def cases(url: str, model: str) -> list[Case]:
    """Every case; *url* is any server of the model, asked for its tokens only."""
    common = {"model": model, "max_tokens": TOKENS_OUT}
    tokens = text_tokens(url, model)
    made = [Case(f"{length}-tokens", {**common, "prompt": tokens[length : 2 * length]}) for length in LENGTHS]
    made += [Case(f"text-{index}", {**common, "prompt": text}) for index, text in enumerate(TEXTS)]
    made += [
        Case(f"chat-{index}", {**common, "messages": [{"role": "user", "content": text}]})
        for index, text in enumerate(CHATS)
    ]
    return made


def text_tokens(url: str, model: str) -> list[int]:
    """Tokens of a text that lies in this repository, at least twice the longest prompt."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()[:6000]
    code, _, raw = post(f"{url}/tokenize", {"model": model, "prompt": text})
    assert code == 200, raw
    tokens: list[int] = json.loads(raw)["tokens"]
    assert len(tokens) > 2 * max(LENGTHS)
    return tokens
