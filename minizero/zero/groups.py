"""ZeRO within groups of ranks, with copies across the groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from .. import comm
from ..comm import Work
from ..memory.plan import Plan
from .flat import Unit
from .seams import Storage
from .sharded import ShardedFlat


class GroupFlat(ShardedFlat):
    """A flat buffer of which each group of ranks has all N shards.

    Of R groups, each rank keeps R shards, one after the other. It updates
    all of them, as its peers in other groups do; or one, if `alone`.
    `bits`: what is gathered is quantized to 8 or 4 bits; None: it is not.
    """

    def __init__(
        self, groups: comm.Groups, alone: bool, bits: int | None, *args: Any
    ) -> None:
        self.groups, self.alone, self.bits = groups, alone, bits
        super().__init__(*args)

    def kept(self, buffer: Tensor) -> Tensor:
        """The shards of a buffer that this rank keeps, [R * size]."""
        return buffer.view(self.groups.size, -1)[self.groups.place]

    def own(self, buffer: Tensor) -> Tensor:
        """Those that it updates, [R * size] or [size]."""
        kept = self.kept(buffer)
        if not self.alone:
            return kept
        return kept.view(self.groups.copies, -1)[self.groups.number]

    def keep(self, storage: Storage) -> None:
        super().keep(storage)
        if self.alone:
            every = self.stored.view(self.groups.copies, -1)
            self.shard = every[self.groups.number]

    def quantized(self) -> comm.Quantized | None:
        """Each shard is quantized by itself: its codes are those of one rank."""
        return comm.Quantized(self.bits, self.size) if self.bits else None

    def launch_gather(self, own: Tensor) -> Work:
        return comm.all_gather(
            self.full, own, async_op=True,
            group=self.groups.within, quantized=self.quantized(),
        )  # fmt: skip

    def make_exact(self) -> None:
        """Gather the shards of all ranks again, as they are.

        Copies that came from another group have been quantized, too.
        """
        if not self.bits:
            return
        n, shards = self.ranks.size, self.full.view(self.ranks.size, -1)
        rows = [shards[comm.shard_of(r, self.groups.size, n)] for r in range(n)]
        with self.storage.on_copy_stream() as arrive:
            kept = self.storage.load(self.stored, self.kept(self.full))
            one = kept.view(self.groups.copies, -1)[self.groups.number]
            work = comm.all_gather(rows, one, async_op=True, group=self.ranks)
        work.then(arrive).wait()


def in_groups(kind: Any) -> Any:
    """A stage of ZeRO whose shards are kept once in each group of ranks.

    What the plan shards is spread over the ranks of a group, and every group
    has a copy (MiCS, Zhang et al. 2022; HSDP, Zhao et al. 2023). Where only
    parameters have a group, gradients and optimizer state are sharded over
    all ranks (hpZ, Wang et al. 2023).
    """

    class InGroups(kind):
        """`weight_bits`, `gradient_bits`: 8 or 4 sends these quantized to so
        many bits (qwZ and qgZ, Wang et al. 2023); None as they are."""

        def __init__(
            self,
            *args: Any,
            plan: Plan,
            group: comm.Group | None = None,
            weight_bits: int | None = None,
            gradient_bits: int | None = None,
            **options: Any,
        ) -> None:
            check_groups(plan, weight_bits, gradient_bits)
            every = group or comm.everyone()
            self.groups = groups = comm.Groups(plan.group or every.size, every)
            self.alone = groups.copies > 1 and plan.optimizer.group is None
            self.flat_type = partial(GroupFlat, groups, self.alone, weight_bits)
            self.quantized = None
            if gradient_bits:
                self.quantized = comm.Quantized(gradient_bits)
            super().__init__(*args, plan=plan, group=every, **options)

        def reduce(self, unit: Unit) -> None:
            """Launch the mean within the group; that across groups follows."""
            for flat in unit.trainable:
                rows = flat.full_grad().view(self.groups.size, -1)
                group, place = self.groups.within, self.groups.place
                works = self._mean(rows, group, place)
                unit.works += works
                works[-1].then(partial(self._reduce_across, unit, flat))

        def _reduce_across(self, unit: Unit, flat: Any) -> None:
            """Average what the groups have: all kept shards, or the own."""
            if self.groups.copies > 1:
                kept = flat.kept(flat.full_grad())
                rows = kept.view(self.groups.copies, -1)
                place = self.groups.number if self.alone else None
                with comm.phase(unit=unit.name):
                    works = self._mean(rows, self.groups.across, place)
                for work in works:
                    work.wait()
            self.reduced(flat)

        def _mean(
            self, rows: Tensor, group: comm.Group, place: int | None
        ) -> list[Work]:
            """Launch the mean over a group of one row, or of all, by buckets."""
            how: Any = {"group": group, "quantized": self.quantized}
            how |= {"async_op": True, "average": True}
            works, size = [], rows.shape[1]
            width = max(1, self.bucket_size // len(rows))
            for a in range(0, size, width):
                part = rows[:, a : a + width]
                if place is None:
                    works.append(comm.all_reduce(part, **how))
                else:
                    works.append(comm.reduce_scatter(part[place], part, **how))
            return works

        def gather(self, unit: Unit) -> None:
            if self.alone:
                unit.wait()  # other groups' shards may be on their way
            super().gather(unit)

        def publish(self, unit: Unit) -> None:
            """Launch what sends updated shards to ranks that keep them."""
            if self.plan.parameters.sharded:
                self.release(unit)  # old values
            flats: list[Any] = unit.changed
            for flat in flats:
                if not self.plan.parameters.sharded:
                    own, group = flat.own(flat.full), self.groups.within
                    work = comm.all_gather(
                        flat.full, own, async_op=True, group=group
                    )
                    unit.works.append(work)
                elif self.alone:
                    # quantizing replaces the own part, too: put it back
                    own = flat.shard.clone()
                    work = comm.all_gather(
                        flat.stored, own, async_op=True,
                        group=self.groups.across, quantized=flat.quantized(),
                    )  # fmt: skip
                    work.then(partial(flat.shard.copy_, own))
                    unit.works.append(work)

        def all_rows(self, mine: Tensor) -> Tensor:
            group = self.group if self.alone else self.groups.within
            n = self.group.size
            every = mine.new_empty(n, mine.shape[1])
            comm.all_gather(every, mine, group=group)
            if not self.alone:
                return every
            size = self.groups.size
            return every[[comm.rank_of(shard, size, n) for shard in range(n)]]

        @contextmanager
        def gathered(self, units: list[Unit]) -> Iterator[None]:
            with super().gathered(units):
                for unit in units if self.plan.parameters.sharded else ():
                    flats: list[Any] = unit.flats
                    for flat in flats:
                        flat.make_exact()
                yield

    return InGroups


def check_groups(
    plan: Plan, weight_bits: int | None, gradient_bits: int | None
) -> None:
    """Raise ValueError for what is not done in groups, or quantized."""
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
