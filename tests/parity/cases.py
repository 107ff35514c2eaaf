"""What the script trains, under DeepSpeed and under minizero."""

from __future__ import annotations

from typing import Any

STEPS = 20

Config = dict[str, Any]


def config(stage: int, micro: int = 2, accumulation: int = 1, **more: Any) -> Config:
    """A config of both; the limits of stage 3 let a small model be sharded."""
    zero: Config = {"stage": stage}
    if stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 10_000,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        **more,
    }


def adam(lr: float = 1e-2, **more: Any) -> Config:
    return {"type": "AdamW", "params": {"lr": lr, "torch_adam": True, **more}}


def sgd(lr: float = 0.3, **more: Any) -> Config:
    return {"type": "SGD", "params": {"lr": lr, **more}}


def schedule(name: str, **params: Any) -> Config:
    return {"type": name, "params": params}


WARM = {"warmup_num_steps": 4}
FP16 = {
    "enabled": True,
    "initial_scale_power": 10,
    "loss_scale_window": 4,
    "hysteresis": 2,
}


def _cases() -> dict[str, Config]:
    found: dict[str, Config] = {}
    for stage in range(4):
        # Adam, two groups, a schedule
        found[f"adam-{stage}"] = {
            "config": config(
                stage,
                optimizer=adam(),
                scheduler=schedule("WarmupDecayLR", total_num_steps=30, **WARM),
            ),
            "groups": True,
        }
        # clipping shows with SGD: Adam's update does not depend on the size
        found[f"sgd-{stage}"] = {
            "config": config(
                stage,
                accumulation=3,
                gradient_clipping=0.5,
                optimizer=sgd(momentum=0.9),
                scheduler=schedule(
                    "OneCycle",
                    cycle_min_lr=0.05,
                    cycle_max_lr=0.3,
                    cycle_first_step_size=6,
                    cycle_momentum=False,
                ),
            ),
        }
        # overflows: two in a row, one later, and growth in between
        found[f"fp16-{stage}"] = {
            "config": config(
                stage,
                fp16=FP16,
                gradient_clipping=0.3,
                optimizer=sgd(),
                scheduler=schedule("WarmupLR", **WARM),
            ),
            "poison": [2, 3, 11],
        }
    found["cosine-2"] = {
        "config": config(
            2,
            accumulation=2,
            gradient_clipping=0.0,
            optimizer=sgd(nesterov=True, momentum=0.8),
            scheduler=schedule("WarmupCosineLR", total_num_steps=18, **WARM),
        ),
        "groups": True,
    }
    found["cycle-1"] = {
        "config": config(
            1,
            optimizer=adam(weight_decay=0.01),
            scheduler=schedule(
                "OneCycle",
                cycle_min_lr=1e-3,
                cycle_max_lr=1e-2,
                cycle_first_step_size=5,
                decay_step_size=2,
                decay_lr_rate=0.5,
            ),
        ),
    }
    found["client-1"] = {"config": config(1), "client": True, "groups": True}
    found["loader-2"] = {
        "config": config(2, micro=4, optimizer=adam()),
        "loader": True,
    }
    for case in found.values():
        case["steps"] = STEPS
    return found


CASES = _cases()
