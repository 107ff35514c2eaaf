"""A flat buffer that is whole only while it is used."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from .. import comm
from ..comm.collectives import Work
from .absent import AbsentFlat
from .interfaces import Home


class ShardedFlat(AbsentFlat):
    """A flat buffer that is empty, except between `gather` and `free`.

    `shard`: [size], this rank's, always there, where `home` keeps it.
    `used`: whether its unit needs it whole. `pinned`: how many others do.
    """

    home = Home()

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], group: int | None
    ) -> None:
        super().__init__(named, group)
        self.pinned, self.used = 0, False
        self.shard = self.full.new_empty(0)
        self._arriving: Work | None = None

    @property
    def whole(self) -> bool:
        """Whether `full` is there, and nothing of it still under way."""
        there = self.full.untyped_storage().nbytes() > 0
        return there and self._arriving is None

    def split(self) -> None:
        """Keep the own shard of `full`, and free the rest."""
        self.shard = self.home.store(self.own(self.full), "parameters")
        self.free()

    def gather(self) -> Work:
        """Launch the all-gather of the shards into `full`.

        A second call gets the work of the first, while it is under way.
        """
        if self._arriving is not None:
            return self._arriving
        self.check_unwritten()
        self.full.untyped_storage().resize_(self.padded * self.full.itemsize)
        with self.home.on_copy_stream() as arrive:
            own = self.home.load(self.shard, self.own(self.full))
            work = comm.all_gather(self.full, own, async_op=True)
        self._arriving = work
        return work.then(arrive).then(self._arrive)

    def _arrive(self) -> None:
        self._arriving = None
        self.show()

    def free(self) -> None:
        """Empty the storage, unless somebody still needs it."""
        if self._arriving is not None:
            self._arriving.wait()  # nothing may land in freed memory
        if self.whole and not self.used and not self.pinned:
            self.hide()
            # not `p.data = empty`: the graph's views would keep the storage
            self.full.untyped_storage().resize_(0)
