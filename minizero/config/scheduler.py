"""How the learning rate moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .schema import key

Rates = float | tuple[float, ...]


def _of(default: Any, does: str, **more: Any) -> Any:
    return key(default, does, "the schedule", **more)


@dataclass(frozen=True, kw_only=True)
class _Warmup:
    warmup_num_steps: int = _of(
        1000,
        "Length of the warm-up; 1 counts as 2.",
        unit="steps",
        least=1,
    )
    warmup_type: str = _of(
        "log",
        "How the rate rises.",
        one_of=("log", "linear"),
    )
    last_batch_iteration: int = _of(
        -1,
        "The step that the schedule goes on after.",
        unit="steps",
        least=-1,
    )


@dataclass(frozen=True, kw_only=True)
class WarmupParams(_Warmup):
    """Rise to a learning rate, and stay there."""

    warmup_min_lr: Rates = _of(0.0, "The first learning rate.", least=0)
    warmup_max_lr: Rates | None = _of(
        None,
        "The last learning rate of the warm-up.",
        least=0,
        unset="the optimizer's",
    )


@dataclass(frozen=True, kw_only=True)
class WarmupDecayParams(_Warmup):
    """Rise to a learning rate, and fall to 0 in a line."""

    total_num_steps: int = _of(
        ..., "Length of the run.", unit="steps", least=1
    )
    warmup_min_lr: Rates = _of(0.0, "The first learning rate.", least=0)
    warmup_max_lr: Rates = _of(1e-3, "The highest learning rate.", least=0)


@dataclass(frozen=True, kw_only=True)
class WarmupCosineParams(_Warmup):
    """Rise to the optimizer's learning rate, and fall in a cosine."""

    total_num_steps: int = _of(
        ..., "Length of the run.", unit="steps", least=1
    )
    warmup_min_ratio: float = _of(
        0.0,
        "The first learning rate, over the optimizer's.",
        least=0,
    )
    cos_min_ratio: float = _of(
        1e-4,
        "The last learning rate, over the optimizer's.",
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class OneCycleParams:
    """Rise and fall between two learning rates, then decay."""

    cycle_min_lr: Rates = _of(
        ..., "The lowest learning rate of the cycle.", least=0
    )
    cycle_max_lr: Rates = _of(..., "The highest learning rate.", least=0)
    decay_lr_rate: float = _of(
        0.0, "Decay of the rate after the cycle.", least=0
    )
    cycle_first_step_size: int = _of(
        2000, "Length of the rise.", unit="steps", least=1
    )
    cycle_second_step_size: int | None = _of(
        None,
        "Length of the fall.",
        unit="steps",
        least=0,
        unset="as long as the rise",
    )
    cycle_first_stair_count: int = _of(
        0,
        "Stairs of the rise; 0 rises at every step.",
        unit="stairs",
        least=0,
    )
    cycle_second_stair_count: int | None = _of(
        None,
        "Stairs of the fall.",
        unit="stairs",
        least=0,
        unset="as many as of the rise",
    )
    decay_step_size: int = _of(
        0,
        "How many steps the decay rates are for; 0 is no decay.",
        unit="steps",
        least=0,
    )
    cycle_momentum: bool = _of(True, "Move the first beta the other way.")
    cycle_min_mom: Rates = _of(0.8, "The lowest first beta.", least=0, most=1)
    cycle_max_mom: Rates = _of(
        0.9, "The highest first beta.", least=0, most=1
    )
    decay_mom_rate: float = _of(0.0, "Growth of the beta after the cycle.")
    last_batch_iteration: int = _of(
        -1,
        "The step that the schedule goes on after.",
        unit="steps",
        least=-1,
    )


SCHEDULERS: dict[str, type] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
}


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """How the learning rate moves, unless `initialize` is given that."""

    type: str = key(
        ...,
        "Which schedule.",
        "a schedule of the engine",
        one_of=tuple(SCHEDULERS),
        advice={
            "": "pass another scheduler to minizero.initialize as "
            "lr_scheduler=",
            "lrrangetest": "pass torch's LinearLR as lr_scheduler=",
        },
    )
    params: (
        WarmupParams | WarmupDecayParams | WarmupCosineParams | OneCycleParams
    ) = key(
        None,
        "Its options.",
        "the arguments of the schedule",
        variants=SCHEDULERS,
        unset="all at their defaults",
    )
