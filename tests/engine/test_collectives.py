"""Collectives over rows, on real gloo groups of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from baton.engine.collectives import (
    all_gather_rows,
    columns_to_rows,
    even_sizes,
    reduce_scatter_rows,
    rows_to_columns,
)


def on_ranks(work: Callable[[int], Any], ranks: int, folder: Path) -> list[Any]:
    """What *work* gives on each rank of a gloo group of forked processes; an exception as its text."""
    processes.start_processes(_one, (work, ranks, folder), nprocs=ranks, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _one(rank: int, work: Callable[[int], Any], ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        made = work(rank)
    except ValueError as error:
        made = str(error)
    torch.save(made, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def rows_of(rank: int, count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows that say whose they are and which: 10 x rank + row, the same in each column."""
    return (10 * rank + torch.arange(count)).unsqueeze(1).expand(count, width).to(dtype)


@pytest.mark.parametrize("sizes", [[3, 3], [1, 4], [4, 1], [0, 2], [2, 1, 3, 1]], ids=str)
def test_rows_are_gathered_in_the_order_of_ranks(sizes: list[int], tmp_path: Path) -> None:
    """Several tensors of different types and widths at once, as experts are given states, weights and ids."""

    def work(rank: int) -> list[torch.Tensor]:
        count = sizes[rank]
        ids = rows_of(rank, count, 2, torch.int32)
        return all_gather_rows([rows_of(rank, count, 3, torch.bfloat16), ids, ids[:, 0].bool()], sizes)

    expected = [float(10 * rank + row) for rank, size in enumerate(sizes) for row in range(size)]
    for states, ids, flags in on_ranks(work, len(sizes), tmp_path):
        assert (states.dtype, tuple(states.shape)) == (torch.bfloat16, (sum(sizes), 3))
        assert states[:, 0].tolist() == expected
        assert (ids.dtype, ids[:, 1].tolist()) == (torch.int32, expected)
        assert flags.tolist() == [value != 0 for value in expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [0, 2], [1, 2, 1]], ids=str)
def test_each_rank_gets_the_sum_of_its_rows(sizes: list[int], dtype: torch.dtype, tmp_path: Path) -> None:
    def work(rank: int) -> torch.Tensor:
        return reduce_scatter_rows(rows_of(rank, sum(sizes), 5, dtype), sizes)

    first = 0
    for made, size in zip(on_ranks(work, len(sizes), tmp_path), sizes, strict=True):
        # row r of rank k holds 10 k + r
        ranks = len(sizes)
        assert made.dtype == dtype
        assert made[:, 4].tolist() == [10 * sum(range(ranks)) + ranks * row for row in range(first, first + size)]
        first += size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [[2, 2], [1, 3], [0, 2], [2, 1, 3]], ids=str)
def test_columns_of_all_ranks_come_side_by_side_and_go_back(
    sizes: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Row r, column c of the whole is 10 r + c; a rank has two columns of all rows, and gets its rows of all."""
    width = 2
    whole = 10 * torch.arange(sum(sizes)).unsqueeze(1) + torch.arange(width * len(sizes))

    def work(rank: int) -> list[torch.Tensor]:
        part = whole[:, rank * width :][:, :width].to(dtype)
        own = rows_to_columns(part, sizes)
        return [own, columns_to_rows(own, sizes)]

    first = 0
    for rank, (own, part) in enumerate(on_ranks(work, len(sizes), tmp_path)):
        assert (own.dtype, part.dtype) == (dtype, dtype)
        assert own.tolist() == whole[first : first + sizes[rank]].tolist()
        assert part.tolist() == whole[:, rank * width :][:, :width].tolist()
        first += sizes[rank]


def test_a_sum_in_a_short_type_is_made_in_a_long_one(tmp_path: Path) -> None:
    """256 + 1 + 1 is 258 in bfloat16, and 256 when it is rounded after each step."""

    def work(rank: int) -> torch.Tensor:
        return reduce_scatter_rows(torch.full((3, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16), [1, 1, 1])

    assert [made.item() for made in on_ranks(work, 3, tmp_path)] == [258.0] * 3


def test_what_does_not_fit_is_said_with_both_numbers(tmp_path: Path) -> None:
    def work(rank: int) -> list[str]:
        rows = torch.zeros(3, 1)
        return [
            _refusal(lambda: all_gather_rows([rows], [2, 2])),
            _refusal(lambda: all_gather_rows([rows], [3])),
            _refusal(lambda: reduce_scatter_rows(rows, [2, 2])),
            _refusal(lambda: rows_to_columns(rows, [2, 2])),
            _refusal(lambda: columns_to_rows(rows, [2, 2])),
        ]

    assert on_ranks(work, 2, tmp_path)[0] == [
        "this rank has 3 rows to gather, and the sizes [2, 2] say 2",
        "1 sizes for 2 ranks",
        "3 rows cannot be scattered to ranks of [2, 2] rows",
        "3 rows cannot be scattered to ranks of [2, 2] rows",
        "this rank has 3 rows to share out, and the sizes [2, 2] say 2",
    ]
    assert even_sizes(6, 3) == [2, 2, 2]
    with pytest.raises(ValueError, match="7 rows cannot be scattered evenly to 2 ranks"):
        even_sizes(7, 2)


def _refusal(work: Callable[[], Any]) -> str:
    with pytest.raises(ValueError) as caught:
        work()
    return str(caught.value)
