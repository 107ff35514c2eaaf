"""One function for every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..memory.plan import Plan
from .data_parallel import DataParallel
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    **options: Any,
) -> DataParallel:
    """Train `model` as `plan` says (default: stage 3).

    The options are those of `DataParallel`.
    """
    plan = Plan.stage(3) if plan is None else plan
    kinds: dict[tuple[bool, ...], type[DataParallel]] = {
        (False, False, False): DataParallel,
        (False, False, True): ZeRO1,
        (False, True, True): ZeRO2,
        (True, True, True): ZeRO3,
    }
    every = plan.parameters, plan.gradients, plan.optimizer
    kind = kinds.get(tuple(placement.sharded for placement in every))
    if kind is None:
        raise ValueError(
            f"{plan} is no stage of ZeRO; shard the optimizer state, then "
            "gradients, then parameters, as Plan.stage(1), (2) and (3) do"
        )
    return kind(model, optimizer, plan=plan, **options)
