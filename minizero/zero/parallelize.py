"""One function for every plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..memory.plan import Plan
from .data_parallel import DataParallel
from .groups import in_groups
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    *,
    weight_bits: int | None = None,
    gradient_bits: int | None = None,
    **options: Any,
) -> DataParallel:
    """Train `model` as `plan` says (default: stage 3).

    The options are those of `DataParallel`. With `weight_bits` or
    `gradient_bits`, 8 or 4, these are quantized when they are sent.
    """
    plan = Plan.stage(3) if plan is None else plan
    kinds: dict[tuple[bool, ...], type[DataParallel]] = {
        (False, False, False): DataParallel,
        (False, False, True): ZeRO1,
        (False, True, True): ZeRO2,
        (True, True, True): ZeRO3,
    }
    every = plan.parameters, plan.gradients, plan.optimizer
    kind: Any = kinds.get(tuple(placement.sharded for placement in every))
    if kind is None:
        raise ValueError(
            f"{plan} is no stage of ZeRO; shard the optimizer state, then "
            "gradients, then parameters, as Plan.stage(1), (2) and (3) do"
        )
    if plan.group or weight_bits or gradient_bits:
        kind, bits = in_groups(kind), (weight_bits, gradient_bits)
        options |= dict(zip(("weight_bits", "gradient_bits"), bits, strict=True))
    return kind(model, optimizer, plan=plan, **options)
