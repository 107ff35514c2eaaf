"""What a config means, in the objects of the chapters before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .ddp import DataParallel
from .launch import device
from .nvme import NVMe
from .offload import Offload
from .overlap import Overlap
from .precision import DynamicLossScale, LossScale, MixedPrecision
from .seams import Home, Schedule
from .zero3 import owners, parallelize

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def loss_scale(config: Config) -> LossScale | None:
    """What losses are multiplied with; None does not look for overflow."""
    fp16 = config.fp16
    if fp16.enabled and not fp16.loss_scale:
        return DynamicLossScale(
            fp16.initial_scale_power,
            fp16.loss_scale_window,
            fp16.hysteresis,
            fp16.consecutive_hysteresis,
            fp16.min_loss_scale,
        )
    if fp16.enabled:
        return LossScale(fp16.loss_scale)
    if config.bf16.enabled:
        return LossScale() if config.bf16.check_grad_overflow else None
    return LossScale() if "float16" in config.dtypes else None


def precision(config: Config) -> MixedPrecision | None:
    """The dtypes of a config; None where everything is fp32."""
    if config.dtypes == ("float32", "float32", None):
        return None
    parameters, reduce, buffers = config.dtypes
    return MixedPrecision(
        getattr(torch, parameters),
        getattr(torch, reduce),
        None if buffers is None else getattr(torch, buffers),
        loss_scale(config),
    )


def schedule(config: Config) -> Schedule | None:
    """When collectives are launched; None: where they are needed."""
    zero = config.zero_optimization
    if not zero.overlap_comm:
        return None
    return Overlap(
        zero.stage3_prefetch_bucket_size,
        zero.stage3_max_live_parameters,
        zero.stage3_param_persistence_threshold,
    )


def home(config: Config) -> Home | None:
    """Where shards rest; None: on the device."""
    plan = config.plan
    if config.files is not None:
        return NVMe(plan, **config.files)
    if any(placement.on == "cpu" for placement in vars(plan).values()):
        return Offload(plan)
    return None


def make_optimizer(
    config: Config,
    given: torch.optim.Optimizer | MakeOptimizer | None,
    parameters: Parameters,
) -> torch.optim.Optimizer:
    """The optimizer: the client's, what its factory makes, or the config's.

    Raises ValueError if there is none, TypeError if it is none of these.
    """
    if isinstance(given, torch.optim.Optimizer):
        return given
    if given is None and config.optimizer is not None:
        name, options = config.optimizer.torch_call()
        return getattr(torch.optim, name)(parameters, **options)
    if given is None:
        raise ValueError(
            "there is no optimizer; give one as optimizer=..., or name one "
            'in the config: {"optimizer": {"type": "AdamW"}}'
        )
    made = given(parameters) if callable(given) else given
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(
            "optimizer= takes a torch.optim.Optimizer, or a function that "
            f"makes one of parameters; this is, or makes, {made!r}"
        )
    return made


def make_scheduler(
    config: Config,
    given: Any,
    optimizer: torch.optim.Optimizer,
) -> Any:
    """The scheduler: the client's, what its factory makes, or the config's.

    None if there is none. Raises ValueError if it moves another optimizer,
    TypeError if it cannot step.
    """
    if given is None and config.scheduler is None:
        return None
    if given is None:
        from . import schedules

        chosen = config.scheduler
        assert chosen is not None
        kind = getattr(schedules, chosen.type)
        return kind(optimizer, **vars(chosen.params))
    # objects of torch's schedulers are not callable
    made = given(optimizer) if callable(given) else given
    if not callable(getattr(made, "step", None)):
        raise TypeError(
            "lr_scheduler= takes an object with step(), or a function that "
            f"makes one of an optimizer; this is, or makes, {made!r}"
        )
    moved = getattr(made, "optimizer", optimizer)
    if moved is not optimizer:
        raise ValueError(
            f"the scheduler moves another optimizer, a "
            f"{type(moved).__name__}; make it of the one given as "
            "optimizer=..., or give a function that makes it"
        )
    return made


def wrap(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: Config
) -> DataParallel:
    """The model as the config places it, on this rank's device."""
    if not owners(model.parameters()):
        model.to(device())
    return parallelize(
        model,
        optimizer,
        config.plan,
        bucket_size=config.zero_optimization.reduce_bucket_size,
        precision=precision(config),
        schedule=schedule(config),
        home=home(config),
    )
