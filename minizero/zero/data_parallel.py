"""Data parallelism on flat buffers: every rank keeps everything."""

from __future__ import annotations

import torch
from torch import nn

from .construction import Construction
from .elementwise import check_elementwise
from .interfaces import Home, Precision, Schedule
from .units import Policy


class DataParallel(Construction):
    """Plan 0: every rank keeps everything; gradients are averaged over ranks.

    The stages of ZeRO are subclasses: each changes what one of the verbs
    `gather`, `release`, `reduce` and `publish` does, and what stays allocated
    in between.

    `optimizer`: an element-wise `torch.optim` optimizer over the model's
    parameters; its groups are re-pointed at shards of the flat buffers.
    `units`: says which modules communicate as one (default: `find_units`).
    `bucket_size`: most elements in one reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        units: Policy | None = None,
        bucket_size: int = 500_000_000,
        precision: Precision | None = None,
        schedule: Schedule | None = None,
        home: Home | None = None,
    ) -> None:
        if bucket_size < 1:
            raise ValueError(
                f"bucket_size must be at least 1, not {bucket_size!r}"
            )
        check_elementwise(optimizer)
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.bucket_size = bucket_size
        self.precision = precision or Precision()
        self.schedule = schedule or Schedule()
        self.home = home or Home()
        self._build(units)
        self._hang_up_hooks()
        self._adopt_optimizer()
        self.schedule.attach(self.units, self.plan)
        self.home.attach()
