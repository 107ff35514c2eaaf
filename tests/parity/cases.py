"""What the script trains, under DeepSpeed and under minizero.

`ours`: what minizero does otherwise for a case, to get what DeepSpeed gets.
"""

from __future__ import annotations

from typing import Any

STEPS = 20

Config = dict[str, Any]


def config(
    stage: int,
    micro: int = 4,
    accumulation: int = 1,
    offload_optimizer: Config | None = None,
    **more: Any,
) -> Config:
    """A config of both; the limits of stage 3 let a small model be sharded."""
    zero: Config = {"stage": stage}
    if offload_optimizer:
        zero["offload_optimizer"] = offload_optimizer
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
                scheduler=schedule(
                    "WarmupDecayLR",
                    total_num_steps=30,
                    warmup_max_lr=[0.02, 0.01],
                    **WARM,
                ),
            ),
            "groups": True,
            "views": [0, 9] if stage else [],
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
        # Overflows: two in a row, one later, and growth in between. At stage 0
        # DeepSpeed has a hysteresis for its own fused Adam only.
        found[f"fp16-{stage}"] = {
            "config": config(
                stage,
                fp16=FP16 if stage else {**FP16, "hysteresis": 1},
                gradient_clipping=0.3,
                optimizer=sgd(),
                scheduler=schedule("WarmupLR", **WARM),
            ),
            "poison": [2, 3, 11],
        }
        found[f"bf16-{stage}"] = {
            "config": config(
                stage,
                accumulation=2,
                bf16={"enabled": True},
                gradient_clipping=0.5,
                optimizer=sgd(momentum=0.9),
            ),
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
    for stage in (2, 3):
        # Nothing is clipped, and the loss scale doubles in every fourth step.
        # DeepSpeed divides gradients by the new scale then, and they carry the old
        # one, so that its update is half as long.
        rates = dict.fromkeys(range(STEPS), 0.3)
        found[f"growth-{stage}"] = {
            "config": config(stage, fp16=FP16, gradient_clipping=0.0, optimizer=sgd()),
            "ours": {"rates": rates | dict.fromkeys(range(4, STEPS, 4), 0.15)},
        }
        # DeepSpeed's own Adam, on the host
        found[f"offload-{stage}"] = {
            "config": config(
                stage,
                accumulation=2,
                optimizer={"type": "Adam", "params": {"lr": 1e-2}},
                offload_optimizer={"device": "cpu", "pin_memory": False},
            ),
            "views": [3],
        }
    # At stage 0 DeepSpeed does not scale the loss, and divides by the scale.
    found["static-0"] = {
        "config": config(
            0,
            fp16={"enabled": True, "loss_scale": 64},
            gradient_clipping=0.0,
            optimizer=sgd(0.3 * 64),
        ),
        "ours": {"rates": {0: 0.3}},
    }
    # DeepSpeed's fused Adam, without decoupled weight decay
    found["fused-1"] = {
        "config": config(
            1,
            optimizer={
                "type": "Adam",
                "params": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False},
            },
        ),
    }
    for stage in (0, 1):
        # three micro-batches a step, two of which are not sent
        found[f"held-{stage}"] = {
            "config": config(stage, gradient_clipping=0.5, optimizer=sgd(0.1)),
            "held": 2,
        }
    found["client-1"] = {"config": config(1), "client": True, "groups": True}
    found["loader-2"] = {
        "config": config(2, micro=4, optimizer=adam()),
        "loader": True,
    }
    for case in found.values():
        case["steps"] = STEPS
    # last, since it replaces torch's linear function for the rest of the process
    return dict(sorted(found.items(), key=lambda item: stage_of(item[1]) == 3))


def stage_of(case: Config) -> int:
    return case["config"]["zero_optimization"]["stage"]


CASES = _cases()
