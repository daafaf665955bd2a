"""What the fake engines compute: tokens of a prompt, the content of its KV blocks, and the text that follows. Pure.

A token is four bytes of UTF-8. A block's content is a digest of everything up to its end, as a KV cache depends on
everything before it. The answer is a function of all blocks and of the sampling fields: whoever reads a wrong block
answers a wrong text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

TOKEN_BYTES = 4
CONTENT_BYTES = 16
LEAST_TOKENS = 8
MOST_TOKENS = 64
"""How long an answer gets that nothing else ends."""

_ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "ch", "sh")
_RIMES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "er", "ir", "or", "ur", "ai")
WORDS = tuple(f" {onset}{rime}" for onset in _ONSETS for rime in _RIMES)
"""The vocabulary of answers: 256 words."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What shapes an answer besides the prompt.

    Attributes:
        cap: output tokens at most.
        least: output tokens at least (``min_tokens``).
        ignore_eos: whether only the cap ends it.
        stop: texts that end it; they are not part of it.
        key: whatever else the choice of tokens depends on, in one text.
    """

    cap: int
    least: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    key: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """An answer: its tokens, why it ended (``length`` or ``stop``), and the text that stopped it, when one did."""

    tokens: tuple[str, ...]
    finish: str
    stop: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def tokens_of(text: str) -> bytes:
    """The tokens of a text, :data:`TOKEN_BYTES` each."""
    raw = text.encode()
    return raw.ljust(-(-len(raw) // TOKEN_BYTES) * TOKEN_BYTES, b"\0")


def tokens_of_ids(ids: Sequence[int]) -> bytes:
    """The tokens that have these ids.

    Raises:
        OverflowError, TypeError: one of them is no id.
    """
    return array("I", ids).tobytes()


def ids_of(tokens: bytes) -> list[int]:
    return array("I", tokens).tolist()


def count_of(tokens: bytes) -> int:
    return len(tokens) // TOKEN_BYTES


def contents_of(tokens: bytes, block_size: int, salt: str = "") -> list[bytes]:
    """What the KV blocks of a prompt hold, the last of which may be part full."""
    state = hashlib.blake2b(salt.encode(), digest_size=CONTENT_BYTES)
    step = block_size * TOKEN_BYTES
    made = []
    for start in range(0, len(tokens), step):
        state.update(tokens[start : start + step])
        made.append(state.copy().digest())
    return made


def answer_of(contents: Iterable[bytes], sampling: Sampling, sample: int = 0) -> Text:
    """The answer that follows blocks of *contents*; *sample* tells the choices of one request apart."""
    state = hashlib.shake_128(b"".join(contents))
    state.update(f"\0{sampling.key}\0{sample}".encode())
    drawn = state.digest(1 + min(sampling.cap, max(MOST_TOKENS, sampling.least, sampling.ignore_eos * sampling.cap)))
    natural = LEAST_TOKENS + drawn[0] % (MOST_TOKENS - LEAST_TOKENS + 1)
    count = sampling.cap if sampling.ignore_eos else min(sampling.cap, max(natural, sampling.least))
    tokens = tuple([WORDS[number] for number in drawn[1 : 1 + count]])
    finish = "length" if count == sampling.cap else "stop"
    return Text(tokens, finish) if not sampling.stop else _stopped(tokens, finish, sampling)


def expected(prompt: bytes, sampling: Sampling, block_size: int, sample: int = 0) -> Text:
    """What any healthy engine answers to a prompt (its tokens): the right answer, without an engine."""
    return answer_of(contents_of(prompt, block_size), sampling, sample)


def most_tokens(sampling: Sampling) -> int:
    """How many tokens an answer can get, to reserve blocks for."""
    return sampling.cap if sampling.ignore_eos else min(sampling.cap, max(MOST_TOKENS, sampling.least))


@lru_cache(maxsize=4096)
def _stopped(tokens: tuple[str, ...], finish: str, sampling: Sampling) -> Text:
    text = ""
    for place, token in enumerate(tokens):
        text += token
        if place + 1 < sampling.least:
            continue
        found = [(at, stop) for stop in sampling.stop if (at := text.find(stop)) >= 0]
        if found:
            kept = []
            end, stop = min(found)
            for each in tokens[: place + 1]:
                if end <= 0:
                    break
                kept.append(each[:end])
                end -= len(each)
            return Text(tuple(kept), "stop", stop)
    return Text(tokens, finish)
