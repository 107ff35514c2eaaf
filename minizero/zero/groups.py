"""Groups of ranks, each of which has a copy of what is sharded.

Where the whole plan is in groups (MiCS, Zhang et al. 2022; HSDP, Zhao et al. 2023), the
ranks of a group divide each buffer between them, and gradients are averaged within the
group, then across (`Net.averaged`). Where only parameters have a group (hpZ, Wang et al.
2023), gradients and optimizer state are divided between all ranks: `CopiedFlat`.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from .. import comm
from ..comm import Work
from .seams import Storage
from .sharded import ShardedFlat


class CopiedFlat(ShardedFlat):
    """A flat buffer that each group of ranks has, and all ranks update together (hpZ).

    Of R groups, each rank keeps R pieces, one after the other, and updates one of them.
    """

    _sending: Work | None = None

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
