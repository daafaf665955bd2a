"""Who shares what with whom: ranks, columns and shards as numbers. Pure; no torch, no vllm.

Ranks of a decode server are laid out replica by replica: rank = replica x tensor parallel size + position in it. A
component of size k is shared by blocks of k consecutive replicas. In a block, the k ranks at the same position form a
*column*; what one of them would hold by tensor parallelism alone is cut into k parts, one each. So the shard of a rank
is (position x k + place in its column) of (tensor parallel size x k), and the parts of a column, put together, are what
tensor parallelism expects at that position: its heads, its columns of a matrix, its rows of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The ranks of a decode server.

    Attributes:
        tensor: ranks of a replica.
        data: replicas.
    """

    tensor: int
    data: int

    def columns(self, size: int) -> list[list[int]]:
        """All columns for components of *size* replicas, each in the order of its replicas.

        Raises:
            ValueError: the replicas don't divide.
        """
        if size < 1 or self.data % size:
            raise ValueError(f"{self.data} replicas cannot be shared out in blocks of {size}")
        return [
            [(first + place) * self.tensor + position for place in range(size)]
            for first in range(0, self.data, size)
            for position in range(self.tensor)
        ]

    def column_of(self, rank: int, size: int) -> list[int]:
        """The column that *rank* is in."""
        return next(column for column in self.columns(size) if rank in column)

    def replica(self, rank: int) -> int:
        return rank // self.tensor

    def shard(self, rank: int, size: int) -> int:
        """Which of (tensor x size) parts of a component's weights *rank* holds."""
        return rank % self.tensor * size + self.replica(rank) % size


def kv_heads_a_rank(kv_heads: int, ranks: int) -> tuple[int, int]:
    """Key-value heads that each of *ranks* holds, and how many ranks hold the same.

    Raises:
        ValueError: neither number is a multiple of the other.
    """
    if kv_heads >= ranks and not kv_heads % ranks:
        return kv_heads // ranks, 1
    if not ranks % kv_heads:
        return 1, ranks // kv_heads
    raise ValueError(f"{kv_heads} key-value heads cannot be shared out among {ranks} ranks")
