"""What is whose where shards are kept in groups of ranks, and what may not be."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import comm
from ..comm.scope import rank_of
from ..memory.plan import Plan
from ..ranks.launch import world_size
from .data_parallel import DataParallel
from .flat_buffer import Flat, Place
from .group_buffers import GroupFlat, GroupShardedFlat, InGroups


class GroupShards(DataParallel):
    """Shards within groups of ranks, and copies of them across the groups.

    In front of a stage of ZeRO, what the plan shards is spread over the ranks of a
    group, and every group has a copy (MiCS, Zhang et al. 2022; HSDP of Zhao et al.
    2023). Where only parameters have a group, gradients and optimizer state are sharded
    over all ranks: `alone`, one shard is this rank's (hpZ, Wang et al. 2023).

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
        grads = super().owned_grads(flat)
        return grads if flat.grad_shard is None else flat.split_own(*grads)


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
