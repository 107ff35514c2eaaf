"""Settings of DeepSpeed's schedules, and what they make of an optimizer's groups."""

from __future__ import annotations

from typing import Any

import torch

WARM = {"warmup_num_steps": 5}
CYCLE = {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2, "cycle_first_step_size": 4}
RANGE = {"lr_range_test_step_size": 5}

# schedule, its options, the learning rates of the groups that it is given
SETTINGS: list[tuple[str, dict[str, Any], list[float]]] = [
    ("WarmupLR", {}, [0.5]),
    ("WarmupLR", WARM, [1e-3]),
    ("WarmupLR", {**WARM, "warmup_type": "linear"}, [1e-3, 0.2]),
    ("WarmupLR", {"warmup_num_steps": 1}, [1e-3]),
    ("WarmupLR", {"warmup_num_steps": 2, "warmup_type": "linear"}, [1e-3]),
    ("WarmupLR", {**WARM, "warmup_min_lr": 1e-4, "warmup_max_lr": 0.01}, [1.0, 2.0]),
    (
        "WarmupLR",
        {**WARM, "warmup_min_lr": [0.0, 0.1], "warmup_max_lr": [0.3, 0.2]},
        [1.0, 2.0],
    ),
    ("WarmupDecayLR", {**WARM, "total_num_steps": 14}, [1.0]),
    ("WarmupDecayLR", {"total_num_steps": 12}, [1.0]),
    (
        "WarmupDecayLR",
        {**WARM, "total_num_steps": 12, "warmup_type": "linear"},
        [1.0, 2.0],
    ),
    (
        "WarmupDecayLR",
        {**WARM, "total_num_steps": 9, "warmup_min_lr": 0.01, "warmup_max_lr": 0.1},
        [1.0],
    ),
    ("WarmupDecayLR", {**WARM, "total_num_steps": 5}, [1.0]),
    ("WarmupDecayLR", {**WARM, "total_num_steps": 3}, [1.0]),
    ("WarmupCosineLR", {**WARM, "total_num_steps": 14}, [1e-3, 0.2]),
    (
        "WarmupCosineLR",
        {
            **WARM,
            "total_num_steps": 14,
            "warmup_min_ratio": 0.1,
            "cos_min_ratio": 0.05,
            "warmup_type": "linear",
        },
        [1e-3],
    ),
    ("WarmupCosineLR", {**WARM, "total_num_steps": 4}, [1e-3]),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 1}, [1e-3]),
    ("WarmupCosineLR", {**WARM, "total_num_steps": 9, "cos_min_ratio": 0.0}, [1e-3]),
    ("OneCycle", CYCLE, [1.0]),
    ("OneCycle", {"cycle_min_lr": 0.0, "cycle_max_lr": 0.5}, [1.0]),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 7}, [1.0, 2.0]),
    ("OneCycle", {**CYCLE, "cycle_second_step_size": 0}, [1.0]),
    (
        "OneCycle",
        {**CYCLE, "cycle_min_lr": [0.1, 0.2], "cycle_max_lr": [0.3, 0.9]},
        [1.0, 2.0],
    ),
    (
        "OneCycle",
        {**CYCLE, "decay_step_size": 3, "decay_lr_rate": 0.5, "decay_mom_rate": 0.1},
        [1.0],
    ),
    ("OneCycle", {**CYCLE, "decay_step_size": 2, "decay_lr_rate": 0.5}, [1.0]),
    ("OneCycle", {**CYCLE, "decay_step_size": 2, "decay_mom_rate": -0.1}, [1.0]),
    ("OneCycle", {**CYCLE, "decay_lr_rate": 0.5}, [1.0]),
    (
        "OneCycle",
        {**CYCLE, "cycle_first_stair_count": 2, "cycle_second_step_size": 6},
        [1.0],
    ),
    (
        "OneCycle",
        {
            **CYCLE,
            "cycle_first_step_size": 9,
            "cycle_first_stair_count": 3,
            "cycle_second_stair_count": 4,
        },
        [1.0],
    ),
    ("OneCycle", {**CYCLE, "cycle_min_mom": 0.6, "cycle_max_mom": 0.95}, [1.0]),
    (
        "OneCycle",
        {**CYCLE, "cycle_min_mom": [0.6, 0.7], "cycle_max_mom": [0.95, 0.9]},
        [1.0, 2.0],
    ),
    ("OneCycle", {**CYCLE, "cycle_momentum": False}, [1.0]),
    ("LRRangeTest", {}, [1.0]),
    ("LRRangeTest", RANGE, [1.0, 2.0]),
    ("LRRangeTest", {**RANGE, "lr_range_test_min_lr": [1e-4, 0.2]}, [1.0, 2.0]),
    ("LRRangeTest", {**RANGE, "lr_range_test_step_rate": 5.0}, [1.0]),
    ("LRRangeTest", {**RANGE, "lr_range_test_staircase": True}, [1.0]),
]
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


def short(columns: Columns) -> dict[str, Any]:
    """For the record: a number for what does not move."""
    return {
        key: [values[0] if len(set(values)) == 1 else values for values in groups]
        for key, groups in columns.items()
    }
