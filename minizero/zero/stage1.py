"""ZeRO-1: optimizer state is sharded."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .. import comm
from ..memory.plan import Plan
from .data_parallel import DataParallel
from .flat import Flat, Unit


class ZeRO1(DataParallel):
    """Plan 1: optimizer state is sharded.

    `reduce` gives each rank the mean gradient of its own shard only. The
    optimizer updates that shard, and `publish`, an all-gather of the updated
    *parameters*, gives every rank the others'. Optimizer state is never sent
    (Rajbhandari et al. 2020, sec. 5.1).
    """

    plan = Plan.stage(1)

    def owned(self, buffer: Tensor, flat: Flat) -> Tensor:
        """The own shard of a buffer, [size]."""
        return flat.own(buffer)

    def reduce(self, unit: Unit) -> None:
        """Launch the averaging of the own shard of the unit's gradients."""
        for flat in unit.trainable:
            grad = flat.full_grad()
            own, shards = flat.own(grad), grad.view(self.group.size, -1)
            for part in flat.pieces(self.bucket_size):
                work = comm.reduce_scatter(
                    own[part], shards[:, part], async_op=True, average=True,
                    group=self.group,
                )  # fmt: skip
                unit.works.append(work)
            work.then(partial(self.reduced, flat))

    def publish(self, unit: Unit) -> None:
        """Launch what sends the own updated shard to every rank."""
        for flat in unit.changed:
            own = flat.own(flat.full)
            work = comm.all_gather(
                flat.full, own, async_op=True, group=self.group
            )
            unit.works.append(work)
