"""vLLM's CPU communicator with what data parallel ranks need to share experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from baton.engine import experts
from baton.engine.collectives import all_gather_rows, even_sizes, reduce_scatter_rows

if TYPE_CHECKING:
    from torch import Tensor


class BatonCpuCommunicator(CpuCommunicator):
    """`CpuCommunicator` that gathers and scatters different numbers of rows a rank.

    Works around: ``CpuCommunicator`` (vllm/distributed/device_communicators/cpu_communicator.py, 0.32) has no
    ``all_gatherv`` and no ``reduce_scatterv``, so that the first step of experts behind data parallel ranks raises
    NotImplementedError.
    Can go when: it has both.

    A group of expert parallel ranks is made in each worker that will share experts, before its model is: the moment
    to put the experts that know their map in place (:func:`baton.engine.experts.register`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_ep_communicator:
            experts.register()

    def all_gatherv(
        self, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        """All ranks' parts along *dim*; *sizes* has the length of each, None when they are alike."""
        given = input_ if isinstance(input_, list) else [input_]
        rows = [tensor.movedim(dim, 0) for tensor in given]
        gathered = all_gather_rows(rows, sizes or [len(rows[0])] * self.world_size, self.device_group)
        made = [tensor.movedim(0, dim) for tensor in gathered]
        return made if isinstance(input_, list) else made[0]

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        """This rank's part along *dim* of the sum over ranks; *sizes* as in :meth:`all_gatherv`."""
        rows = input_.movedim(dim, 0)
        made = reduce_scatter_rows(rows, sizes or even_sizes(rows.shape[0], self.world_size), self.device_group)
        return made.movedim(0, dim)
