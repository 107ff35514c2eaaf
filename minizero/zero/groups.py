"""Groups of ranks, each of which has a copy of what is sharded.

Where the whole plan is in groups (MiCS, Zhang et al. 2022; HSDP, Zhao et al. 2023), the
ranks of a group divide each buffer between them, and gradients are averaged within the
group, then across (`Net.averaged`). Where only parameters have a group (hpZ, Wang et al.
2023), gradients and optimizer state are divided between all ranks: `CopiedFlat`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from .. import comm
from ..comm import Work
from ..memory.plan import Plan
from .seams import Storage
from .sharded import ShardedFlat


class CopiedFlat(ShardedFlat):
    """A flat buffer that each group of ranks has, and all ranks update together (hpZ).

    Of R groups, each rank keeps R pieces, one after the other, and updates one of them.
    """

    _sending: Work | None = None

    def __init__(self, grid: comm.Groups, *args: Any) -> None:
        self.grid = grid
        super().__init__(*args)

    def _updated(self, kept: Tensor) -> Tensor:
        """The piece, of those that are kept, that this rank updates."""
        return kept.view(self.grid.copies, -1)[self.grid.number]

    def own(self, buffer: Tensor) -> Tensor:
        return self._updated(self.kept(buffer))

    def keep(self, storage: Storage) -> None:
        super().keep(storage)
        self.shard = self._updated(self.stored)

    def gather(self) -> Work | None:
        if self._sending is not None:
            self._sending.wait()  # other groups' updates
        return super().gather()

    def send_copies(self) -> list[Work]:
        # quantizing replaces the own part, too: put it back
        own = self.shard.clone()
        work = comm.all_gather(
            self.stored, own, async_op=True,
            group=self.grid.across, quantized=self.quantized,
        )  # fmt: skip
        self._sending = work.then(partial(self.shard.copy_, own))
        return [self._sending]

    def exact(self, kept: Tensor) -> Tensor:
        comm.all_gather(kept, self.shard.clone(), group=self.grid.across)
        return kept


def check_groups(
    plan: Plan, weight_bits: int | None, gradient_bits: int | None
) -> None:
    """Raise ValueError for what is not done in groups, or quantized."""
    if not (plan.group or weight_bits or gradient_bits):
        return
    for bits in (weight_bits, gradient_bits):
        if bits is not None:
            comm.Quantized(bits)
    if not plan.optimizer.sharded:
        raise ValueError(
            "nothing is sharded at stage 0, so there is nothing to quantize; "
            "choose a stage, 3 for weights"
        )
    if weight_bits and not plan.parameters.sharded:
        raise ValueError(
            "weights are quantized as they are gathered for use, which needs "
            "sharded parameters (stage 3); leave weight_bits out"
        )
    parameters, gradients = plan.parameters, plan.gradients
    group = plan.optimizer.group
    same = not gradients.sharded or gradients.group == group
    if parameters.sharded and group:
        same &= parameters.group == group
    if not same:
        raise ValueError(
            f"{plan}: in groups, everything sharded has one group, or the "
            "parameters alone have it; use Plan.stage(stage, group=...)"
        )
    if parameters.group and not group and parameters.on != "device":
        raise ValueError(
            "where only parameters have a group they are stored on the "
            "device, as a copy for the group; leave offload_param out, or "
            "group everything"
        )
