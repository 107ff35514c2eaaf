"""One function for every plan, and what groups of ranks and few bits need.

Where the whole plan is in groups (MiCS, Zhang et al. 2022; HSDP, Zhao et al. 2023), the
ranks of a group divide each buffer between them, and gradients are averaged within the
group, then across (`Net.averaged`). Where only parameters have a group (hpZ, Wang et
al. 2023), gradients and optimizer state are divided between all ranks: `CopiedFlat`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import comm
from ..memory.plan import Plan
from .data_parallel import DataParallel
from .seams import Storage
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ShardedFlat, ZeRO3


class QuantizedFlat(ShardedFlat):
    """A flat buffer whose shards are sent in few bits (qwZ), but exactly to a script.

    bits: 8 or 4; None sends them as they are.
    """

    grid: comm.Groups
    quantized: comm.Quantized | None = None

    def __init__(self, *args: Any, bits: int | None = None) -> None:
        super().__init__(*args)
        self.bits = bits

    def store(self, storage: Storage) -> None:
        if self.bits:
            piece = self.padded // (self.grid.copies * self.grid.size)
            self.quantized = comm.Quantized(self.bits, piece)
        super().store(storage)

    def _launch(self, **how: Any) -> comm.Work:
        return super()._launch(**{"quantized": self.quantized} | how)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        self.gather().wait()
        if self.quantized:  # it came rounded: gather once more
            self._launch(quantized=None).wait()
        with super().gathered():
            yield

    def end_reading(self) -> None:
        if self.quantized and self.used and self.readers == 1:
            self._launch().wait()  # rounded, as the unit had it
        super().end_reading()


class CopiedFlat(QuantizedFlat):
    """A flat buffer that each group of ranks has, and all ranks update together (hpZ).

    Of R groups, each rank keeps R shards, one after the other, and updates one of them.
    """

    def own(self, buffer: Tensor) -> Tensor:
        """The shard, of those that this rank stores, that it updates."""
        return self.stored_part(buffer).view(self.grid.copies, -1)[self.grid.number]

    def store(self, storage: Storage) -> None:
        super().store(storage)
        self.shard = self.stored.view(self.grid.copies, -1)[self.grid.number]

    def shard_updated(self) -> None:
        super().shard_updated()
        self._send(self.quantized)

    def _send(self, quantized: comm.Quantized | None) -> None:
        """Send the updated shard to the ranks of other groups that keep it, too."""
        own, across = self.shard.clone(), self.grid.across
        comm.all_gather(self.stored, own, group=across, quantized=quantized)
        self.shard.copy_(own)  # quantizing has replaced the own part, too

    def _launch(self, **how: Any) -> comm.Work:
        if how:  # exact: then the copies must be, too
            self._send(None)
        return super()._launch(**how)


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    *,
    weight_bits: int | None = None,
    **options: Any,
) -> DataParallel:
    """Train `model` as `plan` says (default: stage 3), with options of `DataParallel`.

    weight_bits: 8 or 4 gathers parameters quantized to so many bits (qwZ, Wang et al.
        2023); None as they are.
    """
    plan = Plan.stage(3) if plan is None else plan
    sharded = plan.optimizer.sharded, plan.gradients.sharded, plan.parameters.sharded
    if sharded != tuple(sorted(sharded, reverse=True)):
        raise ValueError(
            f"{plan} is no stage of ZeRO; shard the optimizer state, then "
            "gradients, then parameters, as Plan.stage(1), (2) and (3) do"
        )
    check_groups(plan, weight_bits, options.get("gradient_bits"))
    kinds = DataParallel, ZeRO1, ZeRO2, ZeRO3
    ranks = options.get("group") or comm.everyone()
    copied = (plan.parameters.group or ranks.size) < ranks.size
    kind = CopiedFlat if copied and not plan.optimizer.group else QuantizedFlat
    if weight_bits or kind is CopiedFlat:
        options["flat_type"] = partial(kind, bits=weight_bits)
    return kinds[sum(sharded)](model, optimizer, plan=plan, **options)


def check_groups(
    plan: Plan, weight_bits: int | None, gradient_bits: int | None
) -> None:
    """Raise ValueError for what is not done in groups, or quantized."""
    parameters, gradients, states = plan.parameters, plan.gradients, plan.optimizer
    if weight_bits and not parameters.sharded or gradient_bits and not states.sharded:
        raise ValueError(
            "what is sharded can be quantized: weights at stage 3, gradients at stages "
            "1 to 3; leave weight_bits or gradient_bits out"
        )
    is_hpz = parameters.group and not states.group
    together = [gradients] if is_hpz else [gradients, parameters]
    if any(part.sharded and part.group != states.group for part in together):
        raise ValueError(
            f"{plan}: in groups, everything sharded has one group, or the "
            "parameters alone have it; use Plan.stage(stage, group=...)"
        )
