"""ZeRO-2: gradients are sharded too."""

from __future__ import annotations

import torch

from ..memory.plan import Plan
from .flat import Flat
from .stage1 import ZeRO1


class ZeRO2(ZeRO1):
    """Plan 2: gradients are sharded too.

    A unit's gradient buffer lives from its first gradient until it has been
    reduced, in the same backward. What stays is the mean of the own shard
    (Rajbhandari et al. 2020, sec. 5.2).
    """

    plan = Plan.stage(2)

    def place(self, flat: Flat) -> None:
        """Keep a shard of gradients, and no full buffer."""
        flat.shard = self.owned(flat.full, flat)
        if flat.trainable:
            zeros = torch.zeros_like(flat.shard, dtype=flat.grad_dtype)
            flat.mean = self.storage.store(zeros, "gradients")

    def reduced(self, flat: Flat) -> None:
        """Add the own shard's mean to the stored one; free the buffer."""
        assert flat.mean is not None
        mean = self.owned(flat.full_grad(), flat)
        self.storage.accumulate(flat.mean, mean)
        flat.grad = None

    def set_aside(self, flat: Flat) -> None:
        """Nothing: the mean has memory of its own."""

    def clear_grads(self, flat: Flat) -> None:
        """Clear the shard, and free what a failed backward has left."""
        flat.grad = None
        flat.uninitialized.clear()
        if flat.mean is not None:
            flat.mean.zero_()
