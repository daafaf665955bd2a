"""A rank's KV cache: a finite number of blocks, who has them, and what they hold. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

GONE = b"freed".ljust(16, b"\0")


class Pool:
    """Blocks that are free or in use.

    A block that is freed loses its content at once: in a real engine the next request overwrites it, sooner or later.

    Args:
        blocks: how many there are.
        cached: how many blocks' contents the prefix cache remembers; 0 for none.

    Attributes:
        held_back: blocks that a fault keeps from everybody.
    """

    def __init__(self, blocks: int, cached: int = 0) -> None:
        self.size = blocks
        self.held_back = 0
        self._next = 1
        self._returned: list[int] = []
        self._contents: dict[int, bytes] = {}
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._most_cached = cached

    @property
    def used(self) -> int:
        return len(self._contents)

    @property
    def free(self) -> int:
        return self.size - len(self._contents) - self.held_back

    def take(self, count: int) -> list[int] | None:
        """*count* blocks without content; None when there are not as many."""
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            # Vllm's block 0 is nobody's.
            if self._returned:
                block = self._returned.pop()
            else:
                block = self._next
                self._next += 1
            self._contents[block] = b""
            taken.append(block)
        return taken

    def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Fill the first blocks with *contents*; they are in the prefix cache from now on."""
        for block, content in zip(blocks, contents, strict=False):
            self._contents[block] = content
        if self._most_cached:
            for content in contents:
                self._cached[content] = None
                self._cached.move_to_end(content)
            while len(self._cached) > self._most_cached:
                self._cached.popitem(last=False)

    def read(self, block: int) -> bytes:
        """What a block holds; of one that is free, what nobody wrote."""
        return self._contents.get(block, GONE)

    def give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            del self._contents[block]
        self._returned += blocks

    def known(self, contents: Sequence[bytes]) -> int:
        """How many blocks from the start the prefix cache knows."""
        for place, content in enumerate(contents):
            if content not in self._cached:
                return place
        return len(contents)
