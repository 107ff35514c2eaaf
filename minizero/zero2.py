"""ZeRO-2: gradients that vanish as they appear."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor

from minizero import tracker
from minizero.flat import Flat, Unit
from minizero.launch import world_size
from minizero.memory import Plan
from minizero.zero1 import ZeRO1


class ZeRO2(ZeRO1):
    """Plan 2: gradients are sharded too (Rajbhandari et al. 2020, sec. 5.2).

    A unit's gradient buffer lives from its first gradient until it is reduced, in
    the same backward; what stays is the sum for the own row, `flat.grad_shard`.
    """

    plan = Plan.stage(2)

    def place(self, flat: Flat) -> None:
        if flat.trainable:
            flat.grad_shard = tracker.label(flat.full.new_zeros(flat.size), "gradients")

    def reduced(self, unit: Unit) -> None:
        """Add the mean to the shard; the whole gradient is not needed any more."""
        for flat in unit.trainable:
            assert flat.grad_shard is not None
            flat.grad_shard.add_(flat.row(flat.new_grad()).div_(world_size()))
            flat.drop_grad()

    def owned_grads(self, flat: Flat) -> list[Tensor]:
        assert flat.grad_shard is not None
        return [flat.grad_shard]

    def clear_grads(self, flat: Flat) -> None:
        assert flat.grad_shard is not None
        flat.grad_shard.zero_()
        flat.drop_grad()

    def no_sync(self) -> NoReturn:
        """Not here: there is no place to keep an unreduced gradient."""
        raise RuntimeError(
            f"{type(self).__name__} shards gradients, so every micro-batch is reduced "
            "and no_sync has nothing to postpone; call backward without it, or use a "
            "plan with replicated gradients (stage 0 or 1)"
        )
