"""ZeRO-1: each rank updates its own shard, with its own optimizer state."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from minizero import comm
from minizero.comm import Work
from minizero.ddp import DataParallel
from minizero.flat import Flat, Unit
from minizero.memory import Plan


class ZeRO1(DataParallel):
    """Plan 1: optimizer state is sharded (Rajbhandari et al. 2020, sec. 5.1).

    `reduce` gives each rank only the sum of its own row; `update` changes that row,
    and an all-gather of the updated *parameters* gives every rank the others' rows.
    Optimizer state is never sent.
    """

    plan = Plan.stage(1)

    def reduce(self, unit: Unit) -> Iterator[Work]:
        for flat in unit.trainable:
            grad = flat.new_grad()
            for a, b in flat.pieces(self.bucket_size):
                own, rows = flat.row(grad)[a:b], flat.rows(grad, a, b)
                yield comm.reduce_scatter(own, rows, async_op=True)

    def owned_rows(self, flat: Flat, buffer: Tensor) -> list[Tensor]:
        return [flat.row(buffer)]

    def update(self, units: list[Unit]) -> None:
        super().update(units)
        for unit in units:
            with comm.phase(unit=unit.name):
                self.publish(unit)

    def publish(self, unit: Unit) -> None:
        """Send the own updated row to every rank."""
        for flat in unit.trainable:
            comm.all_gather(flat.full, flat.row(flat.full))
