"""ZeRO-2: gradients are sharded too (chapter 6)."""

from __future__ import annotations

import torch

from ..memory.plan import Plan
from .flat import Flat
from .stage1 import ZeRO1


class ZeRO2(ZeRO1):
    """Plan 2: gradients are sharded too.

    A unit's gradient buffer lives from its first gradient until it is reduced, in the
    same backward; what stays is the mean of the own shard (Rajbhandari et al. 2020,
    sec. 5.2).
    """

    plan = Plan.stage(2)

    def place(self, flat: Flat) -> None:
        """Keep a shard of gradients, and no whole buffer."""
        flat.shard = self.owned(flat.full, flat)
        if flat.trainable:
            zeros = torch.zeros(
                flat.size, dtype=flat.grad_dtype, device=flat.full.device
            )
            flat.mean = self.storage.store(zeros, "gradients")

    def reduced(self, flat: Flat) -> None:
        """Add the mean to the shard, wherever that rests; the whole gradient goes."""
        self.storage.accumulate(flat.mean, flat.own(flat.full_grad()))
        flat.grad = None

    def clear_grads(self, flat: Flat) -> None:
        """Forget the shard's gradient."""
        flat.grad = None
        flat.mean.zero_()
