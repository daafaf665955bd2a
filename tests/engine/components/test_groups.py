from __future__ import annotations

import pytest

from baton.engine.components.groups import Layout, kv_heads_a_rank


def test_columns_are_the_same_positions_of_consecutive_replicas() -> None:
    assert Layout(tensor=2, data=4).columns(2) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert Layout(tensor=2, data=4).columns(4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert Layout(tensor=1, data=3).columns(1) == [[0], [1], [2]]


def test_sixty_four_ranks_make_sixteen_columns_of_four() -> None:
    """The example of the reference: tensor parallel size 8, components over 4 replicas."""
    columns = Layout(tensor=8, data=8).columns(4)
    assert [len(column) for column in columns] == [4] * 16
    assert columns[0] == [0, 8, 16, 24]
    assert columns[8] == [32, 40, 48, 56]


@pytest.mark.parametrize("size", [0, 3, 8])
def test_blocks_that_do_not_divide_the_replicas_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"4 replicas cannot be shared out in blocks of {size}"):
        Layout(tensor=2, data=4).columns(size)


@pytest.mark.parametrize(("tensor", "data", "size"), [(1, 2, 2), (2, 2, 2), (2, 4, 2), (8, 8, 4), (3, 6, 3)])
def test_a_block_holds_each_shard_once_and_a_column_consecutive_ones(tensor: int, data: int, size: int) -> None:
    layout = Layout(tensor, data)
    for first in range(0, data, size):
        block = range(first * tensor, (first + size) * tensor)
        assert sorted(layout.shard(rank, size) for rank in block) == list(range(tensor * size))
    for column in layout.columns(size):
        start = column[0] % tensor * size
        assert [layout.shard(rank, size) for rank in column] == list(range(start, start + size))
        assert all(layout.column_of(rank, size) == column for rank in column)


def test_the_shard_of_a_rank_is_its_place_in_the_part_of_its_position() -> None:
    layout = Layout(tensor=2, data=2)
    assert [layout.shard(rank, 2) for rank in range(4)] == [0, 2, 1, 3]
    assert [layout.replica(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "expected"), [(8, 2, (4, 1)), (8, 8, (1, 1)), (4, 8, (1, 2)), (1, 6, (1, 6)), (3, 9, (1, 3))]
)
def test_key_value_heads_are_split_or_held_by_several(kv_heads: int, ranks: int, expected: tuple[int, int]) -> None:
    assert kv_heads_a_rank(kv_heads, ranks) == expected


@pytest.mark.parametrize(("kv_heads", "ranks"), [(3, 2), (6, 4), (4, 6)])
def test_key_value_heads_that_fit_neither_way_are_refused(kv_heads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{kv_heads} key-value heads cannot be shared out among {ranks} ranks"):
        kv_heads_a_rank(kv_heads, ranks)
