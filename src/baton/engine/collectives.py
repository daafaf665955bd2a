"""Collectives over rows, for ranks that hold different numbers of them: torch only, on any process group.

Both move bytes, so that every type goes through whatever the group's backend can add or not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

    Group: TypeAlias = dist.ProcessGroup | None


def all_gather_rows(tensors: Sequence[Tensor], sizes: Sequence[int], group: Group = None) -> list[Tensor]:
    """The rows of all ranks, in the order of ranks, for several tensors in one exchange.

    Args:
        tensors: each of this rank's number of rows; beyond the first dimension alike on all ranks.
        sizes: rows of each rank, the same list on all.

    Raises:
        ValueError: *sizes* is not one number a rank, or not this rank's rows.
    """
    rows = _own_rows(sizes, group)
    for tensor in tensors:
        if tensor.shape[0] != rows:
            raise ValueError(f"this rank has {tensor.shape[0]} rows to gather, and the sizes {list(sizes)} say {rows}")
    pieces = [_as_bytes(tensor) for tensor in tensors]
    widths = [piece.shape[1] for piece in pieces]
    # Gloo gathers pieces of one length only.
    longest = max(sizes)
    packed = pieces[0].new_empty(longest, sum(widths))
    torch.cat(pieces, dim=1, out=packed[:rows])
    gathered = packed.new_empty(len(sizes) * longest, sum(widths))
    dist.all_gather_single(gathered, packed, group=group)
    if min(sizes) != longest:
        gathered = torch.cat([gathered[rank * longest :][:size] for rank, size in enumerate(sizes)])
    return [_from_bytes(part, like) for part, like in zip(gathered.split(widths, dim=1), tensors, strict=True)]


def reduce_scatter_rows(tensor: Tensor, sizes: Sequence[int], group: Group = None) -> Tensor:
    """This rank's rows of the sum of all ranks' tensors. Each row is added on one rank, in the order of ranks.

    Args:
        tensor: the rows of all ranks, in their order.
        sizes: rows of each rank, the same list on all.

    Raises:
        ValueError: *sizes* is not one number a rank, or doesn't add up to the rows.
    """
    rows = _own_rows(sizes, group)
    if tensor.shape[0] != sum(sizes):
        raise ValueError(f"{tensor.shape[0]} rows cannot be scattered to ranks of {list(sizes)} rows")
    sent = _as_bytes(tensor)
    received = sent.new_empty(len(sizes) * rows, sent.shape[1])
    dist.all_to_all_single(received, sent, [rows] * len(sizes), list(sizes), group=group)
    parts = _from_bytes(received, tensor).unflatten(0, (len(sizes), rows))
    return parts.sum(0, dtype=tensor.dtype)


def rows_to_columns(tensor: Tensor, sizes: Sequence[int], group: Group = None) -> Tensor:
    """This rank's rows with the columns of all ranks side by side, in the order of ranks.

    Args:
        tensor: [rows of all ranks, columns of this rank].
        sizes: rows of each rank, the same list on all.

    Returns:
        [rows of this rank, ranks x columns].

    Raises:
        ValueError: *sizes* is not one number a rank, or doesn't add up to the rows.
    """
    rows = _own_rows(sizes, group)
    if tensor.shape[0] != sum(sizes):
        raise ValueError(f"{tensor.shape[0]} rows cannot be scattered to ranks of {list(sizes)} rows")
    sent = _as_bytes(tensor)
    received = sent.new_empty(len(sizes) * rows, sent.shape[1])
    dist.all_to_all_single(received, sent, [rows] * len(sizes), list(sizes), group=group)
    pieces = _from_bytes(received, tensor).unflatten(0, (len(sizes), rows))
    return pieces.movedim(0, 1).flatten(1)


def columns_to_rows(tensor: Tensor, sizes: Sequence[int], group: Group = None) -> Tensor:
    """What :func:`rows_to_columns` undoes: the rows of all ranks, with this rank's part of the columns.

    Args:
        tensor: [rows of this rank, ranks x columns].
        sizes: rows of each rank, the same list on all.

    Returns:
        [rows of all ranks, columns].

    Raises:
        ValueError: *sizes* is not one number a rank, or not this rank's rows.
    """
    rows = _own_rows(sizes, group)
    if tensor.shape[0] != rows:
        raise ValueError(f"this rank has {tensor.shape[0]} rows to share out, and the sizes {list(sizes)} say {rows}")
    width = tensor.shape[1] // len(sizes)
    sent = _as_bytes(tensor.unflatten(1, (len(sizes), width)).movedim(1, 0).reshape(len(sizes) * rows, width))
    received = sent.new_empty(sum(sizes), sent.shape[1])
    dist.all_to_all_single(received, sent, list(sizes), [rows] * len(sizes), group=group)
    return _from_bytes(received, tensor[:0, :width])


def even_sizes(rows: int, ranks: int) -> list[int]:
    """*rows* in *ranks* equal parts.

    Raises:
        ValueError: they don't divide.
    """
    if rows % ranks:
        raise ValueError(f"{rows} rows cannot be scattered evenly to {ranks} ranks: give the sizes")
    return [rows // ranks] * ranks


def _own_rows(sizes: Sequence[int], group: Group) -> int:
    ranks = dist.get_world_size(group)
    if len(sizes) != ranks:
        raise ValueError(f"{len(sizes)} sizes for {ranks} ranks")
    return sizes[dist.get_rank(group)]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same as uint8[rows, bytes a row]."""
    rows = tensor.reshape(tensor.shape[0], math.prod(tensor.shape[1:]))
    # A copy: contiguous() leaves the strides of empty and one-column tensors as they are, which view() refuses.
    return rows.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _from_bytes(rows: Tensor, like: Tensor) -> Tensor:
    """What :func:`_as_bytes` made, with the type and the trailing dimensions of *like*."""
    return rows.clone(memory_format=torch.contiguous_format).view(like.dtype).reshape(rows.shape[0], *like.shape[1:])
