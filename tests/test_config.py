"""Configs, good and bad, and what is said about each."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import config_reference
import pytest
from ds_example import EXAMPLE
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from minizero.config import Config, ConfigError, read
from minizero.config.keys import Section, keys, walk
from minizero.config.sections import Optimizer
from minizero.config.unsupported import OLD, ON, REFUSED
from minizero.kernels import optimizer_class
from minizero.lab.plots.charts import config_map, decisions, phase_bars, rate_curves
from minizero.memory.plan import Plan

TYPES = (
    '"Adam", "AdamW", "SGD", "Adagrad", "Muon", "FusedAdam", "CPUAdam" or '
    '"DeepSpeedCPUAdam"'
)

ROOT = Path(__file__).parent.parent
DEEPSPEED = json.loads((ROOT / "tests/deepspeed_keys.json").read_text())

# The ZeRO-3 config of Hugging Face's documentation.
TRAINER: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
        },
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
FILLED = {
    "fp16.enabled": False,
    "bf16.enabled": True,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.betas": [0.9, 0.95],
    "optimizer.params.eps": 1e-8,
    "optimizer.params.weight_decay": 0.1,
    "scheduler.params.warmup_min_lr": 0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 100,
    "zero_optimization.reduce_bucket_size": 768 * 768,
    "zero_optimization.stage3_prefetch_bucket_size": 0.9 * 768 * 800,
    "zero_optimization.stage3_param_persistence_threshold": 7680,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 4,
}


def zero(stage: int = 3, **keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "zero_optimization": {"stage": stage, **keys}}


def top(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **keys}


def adam(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return top(optimizer={"type": kind, "params": params})


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return top(scheduler={"type": kind, "params": params})


def get(config: Config, where: str) -> Any:
    for name in where.split("."):
        config = getattr(config, name)
    return config


# On 4 ranks: a config, and what some keys are then, by dotted name.
GOOD: list[tuple[Any, dict[str, Any]]] = [
    (
        EXAMPLE,
        {
            "train_micro_batch_size_per_gpu": 4,
            "plan": Plan.stage(3, "cpu", "cpu"),
            "dtypes": ("float16", "float16", None),
            "files": None,
            "zero_optimization.stage3_prefetch_bucket_size": 500_000_000,
            "zero_optimization.stage3_max_live_parameters": 1_000_000_000,
        },
    ),
    (json.dumps(EXAMPLE, indent=2), {"train_batch_size": 256}),
    # any two sizes give the third
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2},
        {"gradient_accumulation_steps": 8},
    ),
    (
        {"train_batch_size": 64, "gradient_accumulation_steps": 8},
        {"train_micro_batch_size_per_gpu": 2},
    ),
    (
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8},
        {"train_batch_size": 64},
    ),
    (
        {"train_batch_size": 8},
        {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    ),
    (
        {"train_micro_batch_size_per_gpu": 2},
        {"train_batch_size": 8, "gradient_accumulation_steps": 1},
    ),
    (top(gradient_accumulation_steps=None), {"gradient_accumulation_steps": 1}),
    # DeepSpeed's defaults
    (
        top(),
        {
            "gradient_clipping": 1.0,
            "optimizer": None,
            "zero_optimization.stage": 0,
            "zero_optimization.overlap_comm": False,
            "plan": Plan(),
            "dtypes": ("float32", "float32", None),
        },
    ),
    (zero(2), {"zero_optimization.overlap_comm": False, "plan": Plan.stage(2)}),
    (zero(3), {"zero_optimization.overlap_comm": True}),
    (zero(3, overlap_comm=False), {"zero_optimization.overlap_comm": False}),
    # whole numbers as floats, and sections that are not there
    (
        zero(1, reduce_bucket_size=2e8),
        {"zero_optimization.reduce_bucket_size": 200_000_000},
    ),
    (top(gradient_clipping=0), {"gradient_clipping": 0.0}),
    (top(fp16=None, optimizer=None, aio=None), {"fp16.enabled": False}),
    (
        zero(1, offload_optimizer={"device": "CPU"}),
        {"plan": Plan.stage(1, "cpu")},
    ),
    (
        zero(
            3,
            offload_param={"device": "nvme", "nvme_path": Path("disk")},
            offload_optimizer={"device": "nvme", "nvme_path": "disk"},
        ),
        {
            "plan": Plan.stage(3, "nvme", "nvme"),
            "zero_optimization.offload_param.nvme_path": "disk",
            "files": {
                "folder": "disk",
                "buffer_count": 5,
                "buffer_size": 100_000_000,
                "block_size": 1_048_576,
                "queue_depth": 8,
            },
        },
    ),
    (
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": "disk"})
        | {"aio": {"queue_depth": 32}},
        {
            "files": {
                "folder": "disk",
                "buffer_count": 4,
                "block_size": 1_048_576,
                "queue_depth": 32,
            }
        },
    ),
    # dtypes
    (top(bf16={"enabled": True}), {"dtypes": ("bfloat16", "bfloat16", None)}),
    (
        top(bf16={"enabled": True}, communication_data_type="FP32"),
        {"dtypes": ("bfloat16", "float32", None)},
    ),
    (
        top(
            fp16={"enabled": True},
            communication_data_type="fp32",
            data_types={
                "grad_accum_dtype": "float32",
                "param_dtype": "half",
                "buffer_dtype": "torch.bfloat16",
            },
        ),
        {"dtypes": ("float16", "float32", "bfloat16")},
    ),
    # optimizers and schedules
    (adam("adamw", lr=1e-4), {"optimizer.type": "AdamW"}),
    (adam(betas=(0.8, 0.99)), {"optimizer.params.betas": (0.8, 0.99)}),
    (top(optimizer={"type": "SGD"}), {"optimizer.params.momentum": 0.0}),
    (
        adam("sgd", momentum=0.9) | top(zero_allow_untested_optimizer=True),
        {"optimizer.params.momentum": 0.9},
    ),
    (
        schedule("WarmupLR", warmup_max_lr=[1e-3, 1e-4]),
        {
            "scheduler.params.warmup_max_lr": (1e-3, 1e-4),
            "scheduler.params.warmup_type": "log",
        },
    ),
    (
        schedule("WarmupCosineLR", total_num_steps=5e3),
        {"scheduler.params.cos_min_ratio": 1e-4},
    ),
    (
        schedule("lrrangetest", lr_range_test_step_size=100),
        {
            "scheduler.type": "LRRangeTest",
            "scheduler.params.lr_range_test_min_lr": 1e-3,
        },
    ),
    (
        schedule("OneCycle", cycle_min_lr=0.1, cycle_max_lr=1, decay_step_size=1),
        {"scheduler.params.cycle_momentum": True},
    ),
    # what minizero does not do, not asked for
    (
        top(
            amp={"enabled": False},
            tensorboard={"output_path": "x"},
            sparse_gradients=False,
            compression_training={},
        ),
        {},
    ),
    (zero(3, zero_hpz_partition_size=1, cpu_offload=False, zenflow=None), {}),
]


@pytest.mark.parametrize("source, values", GOOD)
def test_good(source: Any, values: dict[str, Any]) -> None:
    config = read(source, 4)
    assert {where: get(config, where) for where in values} == values
    assert config.warnings == ()
    assert config.world_size == 4


# On 4 ranks: a config that trains, and what it is told.
IDLE: list[tuple[Any, list[str]]] = [
    (
        zero(2, offload_param={"device": "cpu"}, stage3_max_live_parameters=2e9),
        [
            'zero_optimization.offload_param.device = "cpu", '
            "zero_optimization.stage3_max_live_parameters = 2000000000 have no "
            "effect: parameters are sharded at stage 3 only, and the stage is 2"
        ],
    ),
    (
        zero(0, offload_optimizer={"device": "cpu"}),
        [
            'zero_optimization.offload_optimizer.device = "cpu" has no effect: at '
            "stage 0 every rank has all of the optimizer state, on its device"
        ],
    ),
    (
        zero(0, offload_optimizer={"device": "cpu", "delayed_update": True}),
        [
            'zero_optimization.offload_optimizer.device = "cpu", '
            "zero_optimization.offload_optimizer.delayed_update = true have no "
            "effect: at stage 0 every rank has all of the optimizer state, on its "
            "device"
        ],
    ),
    (zero(2, offload_optimizer={"device": "cpu", "delayed_update": True}), []),
    (
        zero(3, overlap_comm=False, stage3_prefetch_bucket_size=0),
        [
            "zero_optimization.stage3_prefetch_bucket_size = 0 has no effect: "
            "without overlap_comm each unit is gathered when it is used, and freed "
            "after that"
        ],
    ),
    (
        zero(3, offload_param={"device": "cpu", "nvme_path": "d"})
        | {"aio": {"queue_depth": 32}},
        [
            'zero_optimization.offload_param.nvme_path = "d" has no effect: '
            'zero_optimization.offload_param.device is not "nvme"',
            'aio.queue_depth = 32 has no effect: nothing is on "nvme"',
        ],
    ),
    (
        zero(2, offload_param={"device": "nvme", "nvme_path": "d"})
        | {"aio": {"queue_depth": 32}},
        [
            'zero_optimization.offload_param.device = "nvme", '
            'zero_optimization.offload_param.nvme_path = "d" have no effect: '
            "parameters are sharded at stage 3 only, and the stage is 2",
            'aio.queue_depth = 32 has no effect: nothing is on "nvme"',
        ],
    ),
    (
        top(bf16={"enabled": True}, fp16={"loss_scale_window": 100}),
        ["fp16.loss_scale_window = 100 has no effect: fp16 is not enabled"],
    ),
    (
        top(bf16={"check_grad_overflow": False}),
        ["bf16.check_grad_overflow = false has no effect: bf16 is not enabled"],
    ),
    (
        top(fp16={"enabled": True, "loss_scale": 128, "hysteresis": 4}),
        ["fp16.hysteresis = 4 has no effect: fp16.loss_scale = 128 is fixed"],
    ),
    (
        adam("AdamW", adam_w_mode=False),
        [
            "optimizer.params.adam_w_mode = false has no effect: AdamW is AdamW; "
            "for L2 decay use the type Adam"
        ],
    ),
    (
        schedule("WarmupDecayLR", total_num_steps=100),
        [
            "scheduler.params.total_num_steps = 100 ends before the warm-up does, "
            "at warmup_num_steps = 1000"
        ],
    ),
    (
        schedule("OneCycle", cycle_min_lr=0, cycle_max_lr=1, decay_lr_rate=0.1),
        [
            "scheduler.params.decay_lr_rate = 0.1 has no effect: decay_step_size "
            "is 0, which is no decay"
        ],
    ),
    (
        schedule(
            "OneCycle",
            cycle_min_lr=0,
            cycle_max_lr=1,
            cycle_momentum=False,
            cycle_max_mom=0.95,
        ),
        [
            "scheduler.params.cycle_max_mom = 0.95 has no effect: cycle_momentum "
            "is false"
        ],
    ),
    (
        zero(2, contiguous_gradients=False, sub_group_size=1e8),
        [
            "zero_optimization.contiguous_gradients = false has no effect: the "
            "gradients of a unit are always views of one buffer",
            "zero_optimization.sub_group_size = 100000000 has no effect: the "
            "update goes unit by unit",
        ],
    ),
    # the other value is what minizero does anyway
    (zero(3, memory_efficient_linear=False, round_robin_gradients=True), []),
    (zero(3, stage3_max_reuse_distance=0), []),
]


@pytest.mark.parametrize("source, warnings", IDLE)
def test_no_effect(source: Any, warnings: list[str]) -> None:
    found = read(source, 4).warnings
    # the order of keys in a section is the schema's, not the config's
    assert sorted(found) == sorted(warnings)


# On 4 ranks: a config, and the sentence it gets.
BAD: list[tuple[Any, str]] = [
    # sizes of a batch
    (
        {},
        "the size of a batch is not known: give train_batch_size or "
        "train_micro_batch_size_per_gpu",
    ),
    (
        {"gradient_accumulation_steps": 4},
        "the size of a batch is not known: give train_batch_size or "
        "train_micro_batch_size_per_gpu",
    ),
    (
        {
            "train_batch_size": 250,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 16,
        },
        "train_batch_size = 250, but train_micro_batch_size_per_gpu * "
        "gradient_accumulation_steps * ranks = 4 * 16 * 4 = 256; leave one of the "
        "three out",
    ),
    (
        {"train_batch_size": 250, "gradient_accumulation_steps": 16},
        "train_batch_size = 250 is no multiple of gradient_accumulation_steps * "
        "ranks = 16 * 4 = 64; use 192 or 256",
    ),
    (
        {"train_batch_size": 250, "train_micro_batch_size_per_gpu": 4},
        "train_batch_size = 250 is no multiple of train_micro_batch_size_per_gpu * "
        "ranks = 4 * 4 = 16; use 240 or 256",
    ),
    (
        {"train_batch_size": 7},
        "train_batch_size = 7 is no multiple of the number of ranks, 4; use 4 or 8",
    ),
    (
        {"train_batch_size": 2},
        "train_batch_size = 2 is no multiple of the number of ranks, 4; use 4",
    ),
    (
        {"train_batch_size": 0},
        "train_batch_size must be a whole number of samples, at least 1, not 0",
    ),
    (
        top(gradient_accumulation_steps=1.5),
        "gradient_accumulation_steps must be a whole number of micro-batches, at "
        "least 1, not 1.5",
    ),
    # types
    (
        top(gradient_clipping=True),
        "gradient_clipping must be a number, at least 0, not true",
    ),
    (
        top(gradient_clipping=None),
        "gradient_clipping must be a number, at least 0, not null; leave it out "
        "for the default",
    ),
    (
        top(gradient_clipping=-1),
        "gradient_clipping must be a number, at least 0, not -1",
    ),
    (
        top(gradient_clipping=float("inf")),
        "gradient_clipping must be a number, at least 0, not Infinity",
    ),
    (
        top(gradient_clipping="lots"),
        'gradient_clipping must be a number, at least 0, not "lots"',
    ),
    (
        zero(True),
        "zero_optimization.stage must be a whole number from 0 to 3, not true",
    ),
    (zero(4), "zero_optimization.stage must be a whole number from 0 to 3, not 4"),
    (
        top(zero_optimization=True),
        "zero_optimization must be an object in braces, not true",
    ),
    (
        zero(offload_param={"device": "gpu"}),
        'zero_optimization.offload_param.device must be "none", "cpu" or "nvme", '
        'not "gpu"',
    ),
    (
        top(fp16={"enabled": True, "loss_scale": -1}),
        "fp16.loss_scale must be a number, at least 0, not -1",
    ),
    (
        top(aio={"block_size": 0}),
        "aio.block_size must be a whole number of bytes, at least 1, not 0",
    ),
    (
        top(communication_data_type="fp8"),
        'communication_data_type must be "fp32", "fp16" or "bf16", not "fp8"',
    ),
    (
        adam(betas=[0.9]),
        "optimizer.params.betas must be a list of 2 numbers from 0 to 1, not [0.9]",
    ),
    (
        schedule("WarmupLR", warmup_min_lr=[]),
        "scheduler.params.warmup_min_lr must be a number, at least 0, or a list "
        "with one for each group, not []",
    ),
    # "auto" outside an integration
    (
        top(fp16={"enabled": "auto"}),
        'fp16.enabled is "auto", but nothing fills it here; give true or false, or '
        "leave it out",
    ),
    (
        {"train_batch_size": "auto"},
        'train_batch_size is "auto", but nothing fills it here; give a whole '
        "number of samples, at least 1, or leave it out",
    ),
    (
        schedule("WarmupDecayLR", total_num_steps="auto"),
        'scheduler.params.total_num_steps is "auto", but nothing fills it here; '
        "give a whole number of steps, at least 1",
    ),
    # unknown keys, at the top too
    (
        top(gradient_cliping=1.0),
        'the config has no key "gradient_cliping"; did you mean "gradient_clipping"?',
    ),
    (
        top(Zero_Optimization={}),
        'the config has no key "Zero_Optimization"; did you mean "zero_optimization"?',
    ),
    (
        top(wallclock_breakdwn=True),
        'the config has no key "wallclock_breakdwn"; did you mean '
        '"wall_clock_breakdown"?',
    ),
    (top(stage=3), 'the config has no key "stage"; it belongs in zero_optimization'),
    (
        zero(fp16={"enabled": True}),
        'zero_optimization has no key "fp16"; it belongs in the top',
    ),
    (
        zero(prefetch_bucket_size=1),
        'zero_optimization has no key "prefetch_bucket_size"; did you mean '
        '"stage3_prefetch_bucket_size"?',
    ),
    (
        zero(offload_optimizer={"devce": "cpu"}),
        'zero_optimization.offload_optimizer has no key "devce"; did you mean '
        '"device"?',
    ),
    (
        top(optimizer={"type": "Adam", "lr": 1e-3}),
        'optimizer has no key "lr"; it belongs in optimizer.params',
    ),
    (
        adam(momentum=0.9),
        'optimizer.params has no key "momentum"; its keys are lr, betas, eps, '
        "weight_decay, adam_w_mode, torch_adam, fused, fp32_optimizer_states",
    ),
    (
        top(zero={"stage": 2}),
        'the config has no key "zero"; did you mean "zero_optimization"?',
    ),
    # a section that is none
    (
        zero(offload_param="cpu"),
        'zero_optimization.offload_param must be an object in braces, not "cpu"; '
        'write {"device": "cpu"}',
    ),
    (
        top(bf16=True),
        'bf16 must be an object in braces, not true; write {"enabled": true}',
    ),
    (
        top(optimizer="AdamW"),
        'optimizer must be an object in braces, not "AdamW"; write {"type": "AdamW"}',
    ),
    (
        top(fp16={"enabled": True, "loss_scale": "dynamic"}),
        'fp16.loss_scale must be a number, at least 0, not "dynamic"; 0 adapts the '
        "scale",
    ),
    (
        zero(reduce_bucket_size="500MB"),
        "zero_optimization.reduce_bucket_size must be a whole number of elements, at "
        'least 1, not "500MB"',
    ),
    # missing keys
    (
        top(optimizer={"params": {"lr": 1e-3}}),
        f"optimizer.type is missing; give {TYPES}",
    ),
    (
        schedule("WarmupCosineLR"),
        "scheduler.params.total_num_steps is missing; give a whole number of "
        "steps, at least 1",
    ),
    (
        top(scheduler={"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}),
        "scheduler.params.cycle_max_lr is missing; give a number, at least 0, or a "
        "list with one for each group",
    ),
    # keys that DeepSpeed knows and minizero does not do
    (top(amp={"enabled": True}), "minizero does not do amp: use fp16 or bf16"),
    (
        top(gradient_allreduce_op="sum"),
        'minizero does not do gradient_allreduce_op = "sum": multiply the loss by '
        "the number of ranks",
    ),
    (
        zero(mics_hierarchical_params_gather=True),
        "minizero does not do zero_optimization.mics_hierarchical_params_gather = "
        "true: a unit is gathered in one collective of its group",
    ),
    # groups of ranks
    (
        zero(3, zero_hpz_partition_size=8),
        "zero_optimization.zero_hpz_partition_size = 8, but groups of 8 cannot be made "
        "of 4 ranks; use a number that divides them: 2, 4",
    ),
    (
        zero(1, mics_shard_size=1),
        "zero_optimization.mics_shard_size = 1 shards nothing; use stage 0, or leave "
        "it out",
    ),
    (
        zero(3, mics_shard_size=2, zero_hpz_partition_size=2),
        "zero_optimization.mics_shard_size and zero_hpz_partition_size both make "
        "groups; the first shards all in them, the second parameters alone: leave one "
        "out",
    ),
    (
        zero(offload_optimizer={"device": "cpu", "ratio": 0.3}),
        "minizero does not do zero_optimization.offload_optimizer.ratio = 0.3: all "
        "of the optimizer state is offloaded; leave it at 1",
    ),
    (
        top(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
        "minizero does not do fp16.fp16_master_weights_and_grads = true: master "
        "weights are fp32, as exact resuming needs",
    ),
    (
        top(optimizer={"type": "Lamb"}),
        f'optimizer.type must be {TYPES}, not "Lamb"; its update '
        "needs the shapes of parameters, and shards have none; use AdamW",
    ),
    (
        top(optimizer={"type": "FusedLamb"}),
        f'optimizer.type must be {TYPES}, not "FusedLamb"; its update needs the '
        "shapes of parameters, and shards have none; use AdamW",
    ),
    (
        top(optimizer={"type": "RMSprop"}),
        f'optimizer.type must be {TYPES}, not "RMSprop"; pass '
        "another element-wise optimizer to minizero.initialize",
    ),
    (
        top(scheduler={"type": "StepLR"}),
        'scheduler.type must be "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", '
        '"OneCycle" or "LRRangeTest", not "StepLR"; pass another scheduler to '
        "minizero.initialize as lr_scheduler=",
    ),
    # keys that contradict each other
    (
        top(fp16={"enabled": True}, bf16={"enabled": True}),
        "fp16 and bf16 are both enabled; disable one of them",
    ),
    (
        zero(offload_param={"device": "nvme"}),
        'zero_optimization.offload_param.device is "nvme", but there is no '
        "nvme_path beside it; give the folder to put files in",
    ),
    (
        zero(1, offload_optimizer={"device": "nvme", "nvme_path": ""}),
        'zero_optimization.offload_optimizer.device is "nvme", but there is no '
        "nvme_path beside it; give the folder to put files in",
    ),
    (
        zero(
            offload_param={"device": "nvme", "nvme_path": "a"},
            offload_optimizer={"device": "nvme", "nvme_path": "b"},
        ),
        'zero_optimization has the nvme_path "b" and "a" in offload_optimizer and '
        "offload_param, but all files are in one folder; give both the same",
    ),
    *(
        (
            zero(3, **offload),
            "zero_optimization.offload_optimizer.delayed_update = true, but only what "
            'is in host memory is updated late; give "device": "cpu", and '
            'offload_param no "nvme"',
        )
        for offload in (
            {"offload_optimizer": {"delayed_update": True}},
            {
                "offload_optimizer": {"device": "cpu", "delayed_update": True},
                "offload_param": {"device": "nvme", "nvme_path": "d"},
            },
        )
    ),
    (
        top(
            communication_data_type="fp32",
            data_types={"grad_accum_dtype": "bf16"},
        ),
        'communication_data_type = "fp32" and data_types.grad_accum_dtype = "bf16" '
        "differ, but minizero sends gradients in the dtype it adds them up in; "
        "leave one of the two out",
    ),
    (
        top(fp16={"enabled": True}, data_types={"param_dtype": "bf16"}),
        'data_types.param_dtype = "bf16", but by fp16.enabled and bf16.enabled '
        "parameters are float16; leave it out",
    ),
    (
        top(fp16={"enabled": True, "initial_scale_power": 1, "min_loss_scale": 4}),
        "fp16.min_loss_scale = 4 is above the first scale, 2 ** "
        "initial_scale_power = 2; lower it",
    ),
    # several at once
    (
        zero(stge=3, overlap_comm="yes") | {"seed": 1},
        "2 problems in the config:\n"
        '- zero_optimization has no key "stge"; did you mean "stage"?\n'
        '- zero_optimization.overlap_comm must be true or false, not "yes"',
    ),
    # not a config at all
    (None, "a config is a dict, the path of a JSON file or JSON text, not None"),
    (3, "a config is a dict, the path of a JSON file or JSON text, not 3"),
    ("", "the config is empty; give a dict, the path of a JSON file or JSON text"),
    ("[1, 2]", "a config is an object in braces, not a list"),
    ('{"a": ' * 5000, "braces are nested too deeply"),
    ("ds\0config", "'ds\\x00config' is no path of a config file: embedded null byte"),
    (
        {"train_batch_size": 10**400},
        "train_batch_size must be a whole number of samples, at least 1, not "
        f"1{'0' * 56}...",
    ),
    (
        '{\n # a comment, of a line\n "train_batch_size" 8\n}',
        "the config is not JSON: line 3, column 21: Expecting ':' delimiter in "
        "'\"train_batch_size\" 8'",
    ),
    (
        '{"train_batch_size": 8, "train_batch_size": 9}',
        '"train_batch_size" is there 2 times; keep one',
    ),
    (
        '{"gradient_clipping": NaN}',
        "gradient_clipping must be a number, at least 0, not NaN",
    ),
]


def in_quotes(where: str, text: str, value: str) -> str:
    return f'{where} = "{text}" is read as {value}; write that'


# On 4 ranks: a config that DeepSpeed takes, a value in it, and what is said.
TAKEN: list[tuple[Any, str, Any, list[str]]] = [
    (
        top(gradient_clipping="0.5"),
        "gradient_clipping",
        0.5,
        [in_quotes("gradient_clipping", "0.5", "0.5")],
    ),
    (
        adam(lr="1e-3", betas=["0.8", 0.9]),
        "optimizer.params.lr",
        1e-3,
        [
            in_quotes("optimizer.params.lr", "1e-3", "0.001"),
            'optimizer.params.betas = ["0.8", 0.9] is read as [0.8, 0.9]; write that',
        ],
    ),
    (
        zero(reduce_bucket_size="5e6"),
        "zero_optimization.reduce_bucket_size",
        5_000_000,
        [in_quotes("zero_optimization.reduce_bucket_size", "5e6", "5000000")],
    ),
    (
        top(wall_clock_breakdown=1),
        "wall_clock_breakdown",
        True,
        ["wall_clock_breakdown = 1 is read as true; write that"],
    ),
    (
        top(bf16={"enabled": "True"}),
        "bf16.enabled",
        True,
        [in_quotes("bf16.enabled", "True", "true")],
    ),
    (top(steps_per_print=0), "steps_per_print", 0, []),
    (top(steps_per_print=float("inf")), "steps_per_print", 0, []),
    ('{"train_batch_size": 8, "steps_per_print": Infinity}', "steps_per_print", 0, []),
    (
        top(bfloat16={"enabled": True}),
        "bf16.enabled",
        True,
        ['bfloat16 is an old spelling; write bf16 = {"enabled": true}'],
    ),
    (
        adam(max_grad_norm=0.3),
        "gradient_clipping",
        0.3,
        [
            "optimizer.params.max_grad_norm is an old spelling; write "
            "gradient_clipping = 0.3"
        ],
    ),
    (
        zero(3, cpu_offload=True, cpu_offload_param=1),
        "places",
        ("cpu", "cpu"),
        [
            f"zero_optimization.{old} is an old spelling; write "
            f'zero_optimization.{new} = {{"device": "cpu"}}'
            for old, new in (
                ("cpu_offload", "offload_optimizer"),
                ("cpu_offload_param", "offload_param"),
            )
        ],
    ),
    (zero(2, cpu_offload=False), "places", ("none", "none"), []),
    (
        zero(3, stage3_gather_fp16_weights_on_model_save=True),
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        True,
        [
            "zero_optimization.stage3_gather_fp16_weights_on_model_save is an old "
            "spelling; write zero_optimization."
            "stage3_gather_16bit_weights_on_model_save = true"
        ],
    ),
    (
        top(seed=1, _comment="mine"),
        "train_batch_size",
        8,
        [
            'the config has no key "seed"; nothing reads it',
            'the config has no key "_comment"; nothing reads it',
        ],
    ),
    (
        """{
        // a comment, /* of its own */ and a "quoted" one
        "train_batch_size": 8, # another
        /* one of
        two lines */
        "zero_optimization": {"stage": 2,}, # the last comma, too
        "checkpoint": {"tag_validation": "Fail"},
        }""",
        "zero_optimization.stage",
        2,
        [],
    ),
    (
        """{
        train_batch_size: 8
        optimizer: {
            type: AdamW
            params: { lr: 1e-3 } # and no quotes, nor commas
        }
        }""",
        "optimizer.type",
        "AdamW",
        [],
    ),
    ("{train_batch_size: 8}", "train_batch_size", 8, []),
    (
        '{"train_batch_size": 8, "log_level": "# // ,}"}',
        "log_level",
        "# // ,}",
        ['log_level = "# // ,}" has no effect: use Python\'s `logging` and `warnings`'],
    ),
]


@pytest.mark.parametrize("source, where, value, said", TAKEN)
def test_taken_as_deepspeed_takes_it(
    source: Any, where: str, value: Any, said: list[str]
) -> None:
    before = copy.deepcopy(source)
    found = read(source, 4)
    assert attrgetter(where)(found) == value
    assert [*found.warnings] == said
    assert source == before, "what was given has changed"


def test_an_old_and_a_new_spelling_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="max_grad_norm is an old spelling of grad"):
        read(adam(max_grad_norm=0.3) | {"gradient_clipping": 1.0})
    assert read(adam(max_grad_norm=1.0) | {"gradient_clipping": 1.0}).warnings


@pytest.mark.parametrize("source, sentence", BAD)
def test_bad(source: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(source, 4)
    assert str(error.value) == sentence


def test_without_quotes_it_needs_hjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match="is not JSON: line 1, column 2.*hjson"):
        read("{train_batch_size: 8}")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text("\ufeff" + json.dumps(EXAMPLE))
    assert read(path, 4) == read(str(path), 4) == read(EXAMPLE, 4)
    assert read(path.read_text(), 4) == read(EXAMPLE, 4)

    def told(source: Path) -> str:
        with pytest.raises(ConfigError) as error:
            read(source, 4)
        return str(error.value).replace(str(tmp_path), "DIR")

    assert told(tmp_path / "ds_confg.json") == (
        "there is no config file DIR/ds_confg.json; did you mean DIR/ds_config.json?"
    )
    assert told(tmp_path / "other") == (
        "there is no config file DIR/other (looked in DIR)"
    )
    assert told(tmp_path / "no" / "a.json") == (
        "there is no config file DIR/no/a.json, and no folder DIR/no"
    )
    assert told(tmp_path) == "DIR is a folder; give the JSON file in it"
    path.write_text(" \n")
    assert told(path) == "the config file DIR/ds_config.json is empty"
    path.write_text('{"train_batch_size": 7}')
    assert told(path) == (
        "DIR/ds_config.json: train_batch_size = 7 is no multiple of the number of "
        "ranks, 4; use 4 or 8"
    )
    path.write_text('{"a": 1 "b": 2}')
    assert told(path).startswith(
        "DIR/ds_config.json is not JSON: line 1, column 9: Expecting ',' delimiter"
    )
    path.write_bytes(b"\xff\xfe{}")
    assert told(path) == (
        "DIR/ds_config.json: it is not UTF-8 text: byte 0 is invalid start byte"
    )
    path.write_text("3")
    assert told(path) == ("DIR/ds_config.json: a config is an object in braces, not 3")


def test_auto_is_filled_by_an_integration() -> None:
    config = read(TRAINER, 4, auto=FILLED)
    assert config.optimizer is not None
    assert config.optimizer.torch_call() == (
        "AdamW",
        {
            "lr": 5e-5,
            "betas": (0.9, 0.95),
            "eps": 1e-8,
            "weight_decay": 0.1,
            "fused": True,
        },
    )
    assert config.zero_optimization.stage3_prefetch_bucket_size == 552960
    assert config.warnings == ()
    with pytest.raises(ConfigError) as error:
        read(TRAINER, 4, auto=FILLED | {"optimizer.params.lr": "fast"})
    assert error.value.problems == [
        'optimizer.params.lr must be a number, at least 0, not "fast"'
    ]
    with pytest.raises(ConfigError) as error:
        read(TRAINER, 4)
    assert len(error.value.problems) == len(FILLED)


@pytest.mark.parametrize(
    "kind, params, name, options",
    [
        ("Adam", {}, "AdamW", {"weight_decay": 0.0, "fused": True}),
        ("Adam", {"adam_w_mode": False}, "Adam", {"weight_decay": 0.0}),
        ("AdamW", {"adam_w_mode": False}, "AdamW", {"fused": True}),
        ("AdamW", {"torch_adam": True}, "AdamW", {"weight_decay": 0.01}),
        ("AdamW", {"torch_adam": True}, "AdamW", {"fused": None}),
        (
            "Adam",
            {"torch_adam": True, "adam_w_mode": False},
            "Adam",
            {"weight_decay": 0.0, "fused": None},
        ),
        ("AdamW", {"torch_adam": True, "fused": True}, "AdamW", {"fused": True}),
        ("SGD", {"lr": 0.1}, "SGD", {"lr": 0.1, "fused": None, "dampening": 0.0}),
        ("FusedAdam", {}, "FusedAdam", {"weight_decay": 0.0, "adam_w_mode": True}),
        ("fusedadam", {"adam_w_mode": False}, "FusedAdam", {"adam_w_mode": False}),
    ],
)
def test_the_optimizer_is_deepspeeds(
    kind: str, params: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    """`Adam` is AdamW there, and decays nothing unless it is told to."""
    import torch

    optimizer = read(adam(kind, **params), 4).optimizer
    assert isinstance(optimizer, Optimizer)
    found, arguments = optimizer.torch_call()
    assert found == name
    assert options.items() <= arguments.items()
    optimizer_class(found)([torch.zeros(2)], **arguments)


@given(*[st.integers(1, 64)] * 3)
@settings(max_examples=50, deadline=None)
def test_any_two_sizes_give_the_third(ranks: int, micro: int, steps: int) -> None:
    sizes = {
        "train_batch_size": micro * steps * ranks,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    whole = read(sizes, ranks)
    for left_out in sizes:
        two = {name: size for name, size in sizes.items() if name != left_out}
        assert read(two, ranks) == whole


def test_world_size() -> None:
    with pytest.raises(ValueError, match="world_size must be at least 1, not 0"):
        read(top(), 0)


def test_it_is_frozen_and_the_source_stays_as_it_is() -> None:
    source = json.loads(json.dumps(EXAMPLE))
    config = read(source, 4)
    assert source == EXAMPLE
    with pytest.raises(ValidationError, match="Instance is frozen"):
        config.gradient_clipping = 2.0  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Instance is frozen"):
        config.zero_optimization.stage = 1  # type: ignore[misc]


def test_an_update_may_be_delayed() -> None:
    """The key leads to `Delayed`: the same weights as with that by hand."""
    import torch

    import minizero
    from minizero import Delayed, Plan, parallelize

    def weights(by_hand: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if by_hand:
            plan = Plan.stage(2, "cpu")
            net: Any = parallelize(model, optimizer, plan, home=Delayed(plan))
        else:
            delayed = {"device": "cpu", "delayed_update": True}
            config = zero(2, offload_optimizer=delayed)
            config |= {"train_batch_size": 1, "gradient_clipping": 0}
            net = minizero.initialize(None, model, optimizer, config=config)[0]
            assert type(net.net.home) is Delayed
        for step in range(3):
            net.backward(net(torch.full((1, 4), step + 1.0)).sum())
            net.step()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(weights(False), weights(True), strict=True):
        assert torch.equal(a, b)


# DeepSpeed, read from its source


def own_keys() -> dict[str, dict[str, Any]]:
    """The default of every key, by section as the stored file names them."""
    found: dict[str, dict[str, Any]] = {}

    def add(section: type[Section], place: str) -> None:
        found[place] = {}
        for name, key in keys(section).items():
            where = f"{place}.{name}".lstrip(".")
            if key.section:
                add(key.section, where)
                continue
            default = "required" if key.required else key.default
            found[place][name] = default
            for kind, params in key.variants.items():
                add(params, f"{where} of {kind}")

    add(Config, "")
    return found


@pytest.mark.parametrize("place", DEEPSPEED["keys"])
def test_keys_and_defaults_are_deepspeeds(place: str) -> None:
    own, found = own_keys(), set()
    at = "optimizer.params of Adam" if place == "optimizer.params" else place
    for name, default in DEEPSPEED["keys"][place].items():
        where = f"{place.partition(' of ')[0]}.{name}".lstrip(".")
        if where in REFUSED:
            assert not REFUSED[where].asks(default), where
        elif where in OLD:
            assert not default
        elif where not in own:  # a section, tested by itself
            if where == "optimizer.params.weight_decay":
                default = None  # 0, as `test_the_optimizer_is_deepspeeds` has it
            mine = own[at][name]
            assert (list(mine) if isinstance(mine, tuple) else mine) == default, where
            found.add(name)
    own_names = own[at].keys() - found
    assert own_names <= {"fused", "delayed_update"}, "DeepSpeed has no such key"


def test_every_section_of_deepspeed_is_known() -> None:
    known = {*keys(Config), *REFUSED, *OLD}
    assert set(DEEPSPEED["sections"]) <= known


def test_writing_out_deepspeeds_defaults_changes_nothing() -> None:
    config: dict[str, Any] = {}
    for place, defaults in DEEPSPEED["keys"].items():
        if "params" in place:
            continue
        section = config
        for name in filter(None, place.split(".")):
            section[name] = section.get(name) or {}
            section = section[name]
        section.update(defaults)
    config["train_batch_size"] = 8
    assert read(config, 4) == read(top(), 4)


# the schema


# They count nothing.
NUMBERS = (
    "fp16.initial_scale_power",
    "fp16.min_loss_scale",
    "zero_optimization.stage",
)


def test_every_key_is_told_of() -> None:
    for where, key in walk(Config):
        assert key.does.endswith("."), where
        assert bool(key.maps) != bool(key.ignored), where
        assert bool(key.unset) == (key.default is None), where
        assert where not in REFUSED
        if key.kind is int and where not in NUMBERS:
            assert key.unit, where


def test_every_refusal_says_what_to_do() -> None:
    for where, refused in REFUSED.items():
        given = {"enabled": True} if refused.off is ON else {"some": "value"}
        assert refused.asks(given), where
        assert not refused.asks(None)
        assert len(refused.instead) > 10, where


def test_the_page_is_the_schemas() -> None:
    text = (ROOT / "book/config-reference.md").read_text()
    assert text == config_reference.page(text), (
        "run python book/config_reference.py book/config-reference.md"
    )
    with pytest.raises(ValueError, match="the page needs the lines"):
        config_reference.page("# Config reference")


def test_it_needs_no_torch() -> None:
    """So that a config can be checked where nothing is installed."""
    program = f"""
import sys, types
package = types.ModuleType("minizero")
package.__path__ = [{str(ROOT / "minizero")!r}]
sys.modules["minizero"] = package
from minizero.config import read
read({{"train_batch_size": 8}}, 4)
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


# the figures


def test_map_of_what_a_config_decides() -> None:
    made = {what: how for _, what, how in decisions(read(EXAMPLE, 4))}
    assert made == {
        "Accumulation": "4 samples a rank, 16 times, 4 ranks",
        "Plan": "sharded: parameters, gradients, optimizer",
        "Offload": "parameters, gradients, optimizer on cpu",
        "MixedPrecision": "float16, first scale 2^16",
        "Overlap": "gathers 500,000,000 elements ahead",
        "Overlap(param_persistence_threshold=...)": "units below 1,000,000 elements "
        "stay whole",
        "parallelize(bucket_size=...)": "reductions of at most 500,000,000 elements",
        "EngineOptimizer": "norm at most 1",
        "torch.optim, lr_schedules": "those given to initialize",
    }
    plain = top(gradient_clipping=0, optimizer={"type": "SGD"})
    made = {what: how for _, what, how in decisions(read(plain, 4))}
    assert made["Plan"] == "sharded: nothing"
    assert made["Home"] == "all on the device"
    assert made["Precision"] == "fp32 throughout"
    assert made["Schedule"] == "waits at once"
    assert made["EngineOptimizer"] == "no clipping"
    assert made["torch.optim, lr_schedules"] == "SGD"
    (axes,) = config_map(read(EXAMPLE, 4)).axes
    drawn = [text.get_text() for text in axes.texts]
    assert "float16, first scale 2^16" in drawn and "Overlap" in drawn


def test_bars_of_phases() -> None:
    runs = {"a": {"forward": 1.0, "backward": 2.0, "step": 0.5}, "b": {"outside": 3.0}}
    (axes,) = phase_bars(runs).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 0.5, 3.0]
    assert [bar.get_x() for bar in axes.patches] == [0.0, 1.0, 3.0, 0.0]
    clear = [bar.get_facecolor()[3] == 0 for bar in axes.patches]
    assert clear == [False, False, False, True]
    with pytest.raises(ValueError, match="nothing to draw"):
        phase_bars({})


def test_curves_of_rates() -> None:
    (axes,) = rate_curves({"a": [0.0, 1.0], "b": [1.0, 0.5]}).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.0, 1.0], [1.0, 0.5]]
    assert list(axes.lines[0].get_xdata()) == [1, 2]
    left, right = rate_curves({"a": [0.0]}, {"b": [1.0]}).axes
    assert left.get_ylim() == right.get_ylim() and len(right.lines) == 1
    with pytest.raises(ValueError, match="nothing to draw"):
        rate_curves({})
