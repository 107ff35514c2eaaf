"""What a config means, in the objects of earlier chapters (chapter 13)."""

from __future__ import annotations

import torch
from torch import nn

from ..config import Config
from ..offload import Delayed, NVMe, Offload
from ..overlap import Overlap
from ..precision import DynamicLossScale, LossScale, MixedPrecision
from ..zero import DataParallel, Schedule, Storage, parallelize
from ..zero.build import Policy

# fmt: off
# Chapter 13 prints these functions, on narrower lines.


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer | None,
    config: Config, units: Policy | None = None,
) -> DataParallel:
    """The model in the plan of a config; frozen without an optimizer."""
    if optimizer is None:
        model.requires_grad_(False)
        optimizer = torch.optim.SGD([{"params": []}])
    weight_bits, gradient_bits = config.bits  # of ZeRO++
    return parallelize(
        model, optimizer, config.plan, units=units,
        bucket_size=config.zero_optimization.reduce_bucket_size,
        precision=precision(config), schedule=schedule(config),
        storage=storage(config),
        weight_bits=weight_bits, gradient_bits=gradient_bits,
    )


def precision(config: Config) -> MixedPrecision | None:
    """The dtypes of a config; None where everything is fp32."""
    if config.dtypes == ("float32", "float32", None):
        return None
    parameters, reduce, buffers = config.dtypes
    buffer_dtype = None if buffers is None else getattr(torch, buffers)
    dtypes = getattr(torch, parameters), getattr(torch, reduce), buffer_dtype
    return MixedPrecision(*dtypes, loss_scale(config))


def schedule(config: Config) -> Schedule | None:
    """When collectives start; None: when their result is needed."""
    zero = config.zero_optimization
    if not zero.overlap_comm:
        return None
    return Overlap(
        zero.stage3_prefetch_bucket_size,
        zero.stage3_max_live_parameters,
        zero.stage3_param_persistence_threshold,
    )


def storage(config: Config) -> Storage | None:
    """Where shards are stored between steps; None: on the device."""
    plan = config.plan
    if config.files is not None:
        return NVMe(plan, **config.files)
    if all(placement.on == "device" for placement in vars(plan).values()):
        return None
    late = config.zero_optimization.offload_optimizer.delayed_update
    return Delayed(plan) if late else Offload(plan)


def loss_scale(config: Config) -> LossScale | None:
    """The factor of losses; None: the default of `MixedPrecision`."""
    fp16, bf16 = config.fp16, config.bf16
    if fp16.enabled and fp16.loss_scale:
        return LossScale(fp16.loss_scale)
    if fp16.enabled:
        return DynamicLossScale(
            fp16.initial_scale_power, fp16.loss_scale_window, fp16.hysteresis,
            fp16.consecutive_hysteresis, fp16.min_loss_scale,
        )
    half = config.dtypes.reduce == "float16"  # even if `fp16` is not enabled
    checks = bf16.check_grad_overflow if bf16.enabled else half
    return LossScale() if checks else None  # scale 1: it finds overflows
