"""DeepSpeed's schedules: what they make of an optimizer's groups, and the record of it.

The record's `settings` are schedule, options and the learning rates of the groups. To
add one, write it there and run `make parity ARGS=--record`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

FILE = Path(__file__).parents[1] / "deepspeed_schedules.json"
RECORD = json.loads(FILE.read_text())
SETTINGS: list[tuple[str, dict[str, Any], list[float]]] = RECORD["settings"]
STEPS = 22

Columns = dict[str, list[list[float]]]


def optimizer(rates: list[float]) -> torch.optim.Optimizer:
    """An Adam with a group for each learning rate."""
    groups = [{"params": [torch.zeros(1)], "lr": rate} for rate in rates]
    return torch.optim.Adam(groups)


def read(moved: torch.optim.Optimizer, columns: Columns) -> None:
    """Add the learning rate and the betas of each group."""
    for index, group in enumerate(moved.param_groups):
        columns["lr"][index].append(float(group["lr"]))
        columns["beta1"][index].append(group["betas"][0])
        columns["beta2"][index].append(group["betas"][1])


def sequence(
    schedules: Any, name: str, options: dict[str, Any], rates: list[float]
) -> Columns:
    """What the constructor leaves, and then every step, by group."""
    moved = optimizer(rates)
    columns: Columns = {key: [[] for _ in rates] for key in ("lr", "beta1", "beta2")}
    schedule = getattr(schedules, name)(moved, **options)
    read(moved, columns)
    for _ in range(STEPS):
        schedule.step()
        read(moved, columns)
    return columns
