"""The four verbs that ZeRO changes, as data parallelism has them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from .. import comm
from ..comm.collectives import Work
from ..memory.plan import Plan
from ..ranks.launch import world_size
from .flat_buffer import Flat, Unit


class Verbs:
    """What a plan does to a unit; here plan 0, which keeps everything.

    A verb launches its collectives, by pieces, and says what to wait for.
    """

    plan = Plan.stage(0)
    flat_type: type[Flat] = Flat
    bucket_size: int

    def place(self, flat: Flat) -> None:
        """Allocate what this plan keeps between steps."""
        if flat.trainable:
            flat.new_grad()

    def gather(self, unit: Unit) -> Iterator[Work]:
        """Launch what makes the unit's parameters whole."""
        yield from ()

    def release(self, unit: Unit) -> None:
        """Free what `gather` allocated."""

    def reduce(self, unit: Unit) -> Iterator[Work]:
        """Launch what sums the unit's gradients over ranks."""
        n = world_size()
        for flat in unit.trainable:
            grad = flat.new_grad()
            for a, b in flat.pieces(self.bucket_size):
                yield comm.all_reduce(grad[n * a : n * b], async_op=True)

    def reduced(self, unit: Unit) -> None:
        """Called when the sums are there: make them means."""
        for flat in unit.trainable:
            for grad in self.owned_grads(flat):
                grad.div_(world_size())
            flat.reduced = True

    def publish(self, unit: Unit) -> Iterator[Work]:
        """Launch what sends updated shards to the ranks that keep them."""
        yield from ()

    def owned_shards(self, flat: Flat, buffer: Tensor) -> list[Tensor]:
        """The shards of a buffer laid out as `flat` that this rank updates."""
        return flat.shards(buffer)

    def owned(self, flat: Flat) -> list[Tensor]:
        """The owned shards of the parameters."""
        return self.owned_shards(flat, flat.full)

    def owned_grads(self, flat: Flat) -> list[Tensor]:
        """The owned shards of the reduced gradient."""
        return self.owned_shards(flat, flat.new_grad())

    def clear_grads(self, flat: Flat) -> None:
        """Zero the gradients that stay allocated between steps."""
        flat.new_grad().zero_()
        flat.total = None
