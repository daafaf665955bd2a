"""Columns of ranks that share a component's weights, with what travels in them; and how many rows each replica has.

Touches vllm 0.32: ``distributed/parallel_state.py`` (`init_model_parallel_group`, `get_world_group`) for groups of the
device's own backend, and ``forward_context.py`` (`DPMetadata.num_tokens_across_dp_cpu`) for the rows, which vLLM agrees
on among the replicas once a step (``v1/worker/dp_utils.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from baton.engine.collectives import all_gather_rows, columns_to_rows, reduce_scatter_rows, rows_to_columns
from baton.engine.components.config import ComponentSizes
from baton.engine.components.groups import Layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@dataclass(frozen=True)
class Column:
    """The ranks that share what this rank would hold by tensor parallelism alone.

    Attributes:
        replicas: data parallel ranks of its members, in order.
        shard: which part of the component's weights this rank holds, of *shards*.
        shards: parts in all: tensor parallel size x ranks of the column.
        group: for tensors of the device.
        cpu_group: for numbers.
    """

    replicas: tuple[int, ...]
    shard: int
    shards: int
    group: Any = None
    cpu_group: Any = None

    @property
    def size(self) -> int:
        return len(self.replicas)

    # The names by which vLLM's vocabulary layers ask a group for their shard.

    @property
    def rank_in_group(self) -> int:
        return self.shard

    @property
    def world_size(self) -> int:
        return self.shards

    def rows(self) -> list[int]:
        """How many tokens each member has in the step under way."""
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().dp_metadata
        if metadata is None:
            raise RuntimeError("a component shared by replicas ran outside of a step that they agreed on")
        tokens = metadata.num_tokens_across_dp_cpu.tolist()
        return [tokens[replica] for replica in self.replicas]

    def gather(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of all members."""
        (rows,) = all_gather_rows([own], sizes, self.group)
        return rows

    def sum_own(self, partial: Tensor, sizes: Sequence[int]) -> Tensor:
        """This member's rows of the sum of all members' *partial* results."""
        return reduce_scatter_rows(partial, sizes, self.group)

    def join(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """This member's rows, with the parts that all members made of them side by side."""
        return rows_to_columns(part, sizes, self.group)

    def split(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """All members' rows, with the part of them that is this member's."""
        return columns_to_rows(own, sizes, self.group)


@dataclass
class LogitsRounds:
    """Keeps the members of the LM head's column together, however often each computes logits in a step.

    A step computes them once, outside of the forward pass and for rows that no other replica knows; a replica without
    requests not at all; and one that was asked for logprobs of a prompt several times. So each time is a round that
    starts with everyone's number of rows, and whether he may come again in this step; and who is done takes part with
    no rows until nobody comes again.

    Attributes:
        comes_again: whether this replica may compute more logits in this step.
        open: whether this step may have another round.
    """

    column: Column
    comes_again: Callable[[], bool] = field(default=lambda: False)
    open: bool = False

    def start(self) -> None:
        """A step begins."""
        self.open = True

    def rows(self, own: int, *, done: bool = False) -> list[int]:
        """How many rows each member has in this round; *done* members say that they won't come again."""
        said = torch.tensor([own, int(not done and self.comes_again())])
        heard = torch.empty(self.column.size, 2, dtype=said.dtype)
        dist.all_gather_single(heard.view(-1), said, group=self.column.cpu_group)
        self.open = bool(heard[:, 1].any())
        return [int(rows) for rows in heard[:, 0]]


@dataclass(frozen=True)
class Shared:
    """What this process shares, by component.

    Attributes:
        columns: those of the components that are on.
        rounds: of the LM head, when that is on.
        weight_bytes: bytes of this rank's weights by component, filled in as layers are made.
    """

    columns: dict[str, Column]
    rounds: LogitsRounds | None = None
    weight_bytes: dict[str, int] = field(default_factory=dict)


_shared = Shared({})


def shared() -> Shared:
    """What this process shares; nothing unless :func:`install` was called."""
    return _shared


def install(made: Shared) -> None:
    """Let layers that are made from now on share as *made* says."""
    global _shared  # noqa: PLW0603 (a process has one model)
    _shared = made


def make(sizes: ComponentSizes, layout: Layout) -> Shared:
    """Make the groups of all columns: collective over all ranks of the decode server, in the same order on each.

    Columns of one size are one group, whatever the components.
    """
    from vllm.distributed.parallel_state import get_world_group, init_model_parallel_group

    rank, world = dist.get_rank(), get_world_group()
    made: dict[int, Column] = {}
    for size in sorted(set(sizes.active.values())):
        coordinator = init_model_parallel_group(
            layout.columns(size),
            world.local_rank,
            dist.get_backend(world.device_group),
            group_name=f"component_dp{size}",
            use_device_communicator=False,
        )
        made[size] = Column(
            replicas=tuple(layout.replica(member) for member in layout.column_of(rank, size)),
            shard=layout.shard(rank, size),
            shards=layout.tensor * size,
            group=coordinator.device_group,
            cpu_group=coordinator.cpu_group,
        )
    columns = {component: made[size] for component, size in sizes.items() if size > 1}
    return Shared(columns, LogitsRounds(columns["lm_head"]) if "lm_head" in columns else None)
