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
    sharded = plan.optimizer.sharded, plan.gradients.sharded, plan.parameters.sharded
    if sharded != tuple(sorted(sharded, reverse=True)):
        raise ValueError(
            f"{plan} is no stage of ZeRO; shard the optimizer state, then "
            "gradients, then parameters, as Plan.stage(1), (2) and (3) do"
        )
    check_groups(plan, options.get("weight_bits"), options.get("gradient_bits"))
    kinds = DataParallel, ZeRO1, ZeRO2, ZeRO3
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
