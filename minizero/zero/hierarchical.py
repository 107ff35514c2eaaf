"""Shards within groups of ranks, copies across them; and what is sent quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from .. import comm
from ..comm.collectives import Work
from ..comm.scope import rank_of, shard_of
from ..memory.plan import Plan
from ..ranks.launch import world_size
from .data_parallel import DataParallel
from .flat_buffer import Flat, Layout, Place, Unit
from .sharded_buffer import ShardedFlat
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3


class InGroups(Layout):
    """A buffer of N shards, of which each rank of a group keeps some.

    `alone`: one of those is updated here, and the others in the other groups; else
    all are, in every group alike.
    """

    groups: comm.Groups
    alone = False

    @property
    def own_size(self) -> int:
        return self.size * (1 if self.alone else self.groups.copies)

    def kept(self, buffer: Tensor) -> Tensor:
        """The shards of a buffer that this rank keeps, [copies * size]."""
        return buffer.view(self.groups.size, -1)[self.groups.place]

    def own(self, buffer: Tensor) -> Tensor:
        """Those that it updates, [own_size]."""
        kept = self.kept(buffer)
        if not self.alone:
            return kept
        return kept.view(self.groups.copies, self.size)[self.groups.group]

    def split_own(self, own: Tensor) -> list[Tensor]:
        """One by one: each is what would be a rank's without groups."""
        return list(own.view(self.own_size // max(self.size, 1), self.size).unbind())


class GroupFlat(InGroups, Flat):
    """A flat buffer whose shards are kept in groups."""


class GroupShardedFlat(InGroups, ShardedFlat):
    """A flat buffer that is gathered within a group, as it is or quantized.

    `parts`: the shards in `shard`.
    """

    bits: int | None = None
    parts: list[Tensor]

    def split(self) -> None:
        super().split()
        copies = self.groups.copies
        self.parts = list(self.shard.view(copies, self.size).unbind())

    def gather(self) -> Work:
        with self.coded(), comm.among(self.groups.within):
            return super().gather()

    def coded(self) -> AbstractContextManager[None]:
        """Blocks begin with each shard: whoever sends it, its code is the same."""
        return comm.quantized(self.bits, self.size or None)

    def make_exact(self) -> None:
        """Gather once more, not quantized, into the whole buffer.

        Of all ranks: a copy that came from another group was in code.
        """
        if not self.bits:
            return
        ranks, n = self.groups, world_size()
        shards = self.full.view(n, self.size)
        rows = [shards[shard_of(r, ranks.size, n)] for r in range(n)]
        with self.home.on_copy_stream() as arrive:
            kept = self.home.load(self.shard, self.kept(self.full))
            own = kept.view(ranks.copies, self.size)[ranks.group]
            work = comm.all_gather(rows, own, async_op=True)
        work.then(arrive).wait()
        self.note_versions()


class Hierarchical(DataParallel):
    """Shards within groups of ranks; gradients are summed within, then across.

    In front of a stage of ZeRO it does the same in groups: what the plan shards is
    spread over the ranks of a group, and every group has a copy (MiCS, Zhang et al.
    2022; HSDP of Zhao et al. 2023). Where only parameters have a group, gradients and
    optimizer state are sharded over all ranks, and updated shards are sent to the other
    groups (hpZ, Wang et al. 2023).

    `weight_bits`, `gradient_bits`: 8 or 4 sends these in so many bits (qwZ, qgZ, same
    paper); None as they are. All options are keywords, and else `DataParallel`'s.
    """

    def __init__(
        self,
        *args: Any,
        plan: Plan,
        weight_bits: int | None = None,
        gradient_bits: int | None = None,
        **options: Any,
    ) -> None:
        check(plan, weight_bits, gradient_bits)
        self.plan, self.groups = plan, comm.Groups(plan.group or world_size())
        self.alone = self.groups.copies > 1 and plan.optimizer.group is None
        self.weight_bits, self.gradient_bits = weight_bits, gradient_bits
        home = options.get("home")
        if self.groups.copies > 1 and home and not home.several:
            raise ValueError(
                f"{type(home).__name__} keeps one shard of a buffer, and in groups a "
                "rank has several; keep the state on the device or on 'cpu', or shard "
                "it over all ranks"
            )
        super().__init__(*args, **options)

    def _new_flat(
        self, named: list[tuple[str, nn.Parameter]], group: int | None, place: Place
    ) -> Flat:
        flat = super()._new_flat(named, group, place)
        assert isinstance(flat, GroupFlat | GroupShardedFlat)
        flat.groups, flat.alone = self.groups, self.alone
        if isinstance(flat, GroupShardedFlat):
            flat.bits = self.weight_bits
        return flat

    @property
    def number(self) -> int:
        return self.groups.shard

    def numbers(self, owned: list[Tensor]) -> list[int]:
        first = self.groups.place * self.groups.copies
        if len(owned) == 1:
            return [self.number]
        return list(range(first, first + len(owned)))

    def of_all(self, mine: Tensor) -> Tensor:
        if not self.alone:
            with comm.among(self.groups.within):
                every = mine.new_empty(world_size(), mine.shape[1])
                comm.all_gather(every, mine)
                return every
        n = world_size()
        order = [rank_of(shard, self.groups.size, n) for shard in range(n)]
        return super().of_all(mine)[order]

    def owned_shards(self, flat: Flat, buffer: Tensor) -> list[Tensor]:
        assert isinstance(flat, InGroups)
        return flat.split_own(flat.own(buffer))

    def owned_grads(self, flat: Flat) -> list[Tensor]:
        assert isinstance(flat, InGroups)
        if flat.grad_shard is not None:
            return flat.split_own(flat.grad_shard)
        return super().owned_grads(flat)

    def reduce(self, unit: Unit) -> Iterator[Work]:
        """Launch the sums within the group; those across follow when these are there."""
        for flat in unit.trainable:
            rows = flat.new_grad().view(self.groups.size, -1)
            works = self._reduce_rows(rows, self.groups.within, self.groups.place)
            if works and self.groups.copies > 1:
                works[-1].then(partial(self._reduce_across, unit, flat))
            yield from works

    def _reduce_across(self, unit: Unit, flat: Flat) -> None:
        """Average what the groups have: to be kept by all, or shard by shard."""
        assert isinstance(flat, InGroups)
        rows = flat.kept(flat.new_grad()).view(self.groups.copies, -1)
        place = self.groups.group if self.alone else None
        with comm.phase(unit=unit.name):
            works = self._reduce_rows(rows, self.groups.across, place)
        for work in works:
            work.wait()

    def _reduce_rows(
        self, rows: Tensor, scope: comm.Scope | None, place: int | None
    ) -> list[Work]:
        """Launch the mean over a scope of each row, or of one, bucket by bucket."""
        works, size = [], rows.shape[1]
        width = max(1, self.bucket_size // len(rows))
        with comm.quantized(self.gradient_bits), comm.among(scope):
            for a in range(0, size, width):
                parts: Any = list(rows[:, a : a + width].unbind())
                whole = rows.view(-1) if width >= size else parts
                options = {"async_op": True, "average": True}
                if place is None:
                    works.append(comm.all_reduce(whole, **options))
                else:
                    works.append(comm.reduce_scatter(parts[place], whole, **options))
        return works

    def publish(self, unit: Unit) -> Iterator[Work]:
        """Launch what sends the updated shards to the ranks of the group."""
        for flat in unit.trainable:
            with comm.among(self.groups.within):
                work = comm.all_gather(flat.full, flat.own(flat.full), async_op=True)
            yield work


class GroupZeRO1(Hierarchical, ZeRO1):
    """Optimizer state in groups."""

    flat_type = GroupFlat


class GroupZeRO2(Hierarchical, ZeRO2):
    """Gradients too."""

    flat_type = GroupFlat


class GroupZeRO3(Hierarchical, ZeRO3):
    """Parameters too: a unit is gathered within the group."""

    flat_type = GroupShardedFlat

    def owned(self, flat: Flat) -> list[Tensor]:
        """The shards updated here; of what is frozen, all that are kept here."""
        assert isinstance(flat, GroupShardedFlat)
        if self.alone and flat.trainable:
            return [flat.parts[self.groups.group]]
        return flat.parts

    def gather(self, unit: Unit) -> Iterator[Work]:
        if self.alone:
            self.finish(unit)  # shards of other groups may be on their way here
        yield from super().gather(unit)

    def publish(self, unit: Unit) -> Iterator[Work]:
        """Launch what sends the own updated shard to the same place of each group."""
        for flat in unit.trainable if self.alone else ():
            assert isinstance(flat, GroupShardedFlat)
            [part] = self.owned(flat)
            # codes replace the own part too, which the optimizer goes on with
            own = part.clone() if flat.bits else part
            with flat.coded(), comm.among(self.groups.across):
                work = comm.all_gather(flat.shard, own, async_op=True)
            yield work.then(partial(part.copy_, own)) if flat.bits else work

    @contextmanager
    def gathered(self, units: list[Unit]) -> Iterator[None]:
        with super().gathered(units):
            for unit in units:
                for flat in unit.flats:
                    assert isinstance(flat, GroupShardedFlat)
                    flat.make_exact()
            yield


IN_GROUPS: dict[type[DataParallel], type[Hierarchical]] = {
    ZeRO1: GroupZeRO1,
    ZeRO2: GroupZeRO2,
    ZeRO3: GroupZeRO3,
}


def check(plan: Plan, weight_bits: int | None, gradient_bits: int | None) -> None:
    """Raise ValueError for what is not done in groups, or quantized."""
    for bits in (weight_bits, gradient_bits):
        with comm.quantized(bits):
            pass
    if not plan.optimizer.sharded:
        raise ValueError(
            "nothing is sharded at stage 0, so there is nothing to quantize; choose a "
            "stage, 3 for weights"
        )
    if weight_bits and not plan.parameters.sharded:
        raise ValueError(
            "weights are quantized as they are gathered for use, which needs sharded "
            "parameters (stage 3); leave weight_bits out"
        )
    parameters, gradients, group = plan.parameters, plan.gradients, plan.optimizer.group
    alike = not gradients.sharded or gradients.group == group
    if parameters.sharded and group:
        alike &= parameters.group == group
    if not alike:
        raise ValueError(
            f"{plan}: in groups, everything sharded has one group, or the parameters "
            "alone have it; use Plan.stage(stage, group=...)"
        )
    if parameters.group and not group and parameters.on != "device":
        raise ValueError(
            "where only parameters have a group they rest on the device, as a copy for "
            "the group; leave offload_param out, or group everything"
        )
