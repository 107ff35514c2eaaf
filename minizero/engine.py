"""A DeepSpeed-shaped engine: what a training script holds."""

from __future__ import annotations

import json
import os
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from . import checkpointing
from .config import Config, read
from .data import Loader
from .facade import EngineOptimizer
from .launch import init_distributed, rank, world_size
from .meter import Throughput
from .resume import Resume
from .wiring import (
    MakeOptimizer,
    MakeScheduler,
    Parameters,
    make_optimizer,
    make_scheduler,
)

Source = str | os.PathLike[str] | Mapping[str, Any]


class Engine(Resume):
    """Trains a model as a config says; made by `initialize`.

    A module around `module`: calls, `train`, `eval`, `parameters` go through
    to it, names have the prefix "module.", and what the engine lacks is
    looked up in the model.

    `net`: the model in its plan. `optimizer`, `lr_scheduler`,
    `training_dataloader`: what `initialize` returns too.
    `global_steps`: updates, those included that were skipped for gradients
        that were not finite (`skipped_steps`). `global_samples`: samples of
        all ranks in these. `micro_steps`: calls of `step`.
    """

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out: gradients were not finite on a rank."""
        return self.net.precision.skipped_steps

    def count(self) -> None:
        super().count()
        self.meter.end_step(
            self.train_batch_size(), self.gradient_accumulation_steps()
        )
        if rank() == 0:
            self._report()

    def _report(self) -> None:
        """Print what the config asks for; on rank 0."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, "
                f"lr={self.get_lr()}, mom={self.get_mom()}, "
                f"loss_scale={self.optimizer.loss_scale:g}, "
                f"{self.meter.recent}",
                flush=True,
            )
            self.meter.reset()
        if self.config.wall_clock_breakdown:
            print(f"step={self.global_steps}, {self.meter.last}", flush=True)

    def throughput(self) -> Throughput:
        """Samples and model FLOPs a second of late, and time of phases.

        Averages over the steps since the last report, or else the last step;
        the first step is left out, for it makes what later ones find.
        """
        recent = self.meter.recent
        return recent if recent.steps else self.meter.last

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients at the last update, before clipping.

        inf if the update was skipped. None before the first one, and where
        the config neither clips nor has `compute_grad_norm`.
        """
        if self.optimizer.overflow:
            return float("inf")
        norm = self.optimizer.norm
        return None if norm is None else norm.item()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, for the next update."""
        return [g.get("lr", 0.0) for g in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas; else 0.0."""
        return [
            group.get("momentum", group.get("betas", 0.0))
            for group in self.optimizer.param_groups
        ]

    def destroy(self) -> None:
        """Finish the save that is under way, and delete offloaded files."""
        self.finish_checkpoint()
        close = getattr(self.net.home, "close", None)
        if close is not None:
            close()


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None = None,
    model_parameters: Parameters | None = None,
    training_data: Any = None,
    lr_scheduler: Any | MakeScheduler | None = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> tuple[Engine, EngineOptimizer, Loader | None, Any]:
    """An engine for `model`, its optimizer, its data loader, its scheduler.

    The arguments are DeepSpeed's, in its order.

    Args:
        args: parsed arguments; `args.deepspeed_config` is the config, if
            there is one (see `add_config_arguments`).
        model: any module; parameters and buffers get rank 0's values.
        optimizer: an element-wise `torch.optim` optimizer over the model's
            parameters, or a function that makes one of `model_parameters`;
            without it the config's is made.
        model_parameters: parameters, or groups (dicts) of them with options;
            default: all of the model.
        training_data: a map-style dataset.
        lr_scheduler: a scheduler, or a function that makes one of the
            optimizer; without it the config's, if any. `engine.step` steps
            it.
        dist_init_required: False if the ranks talk already, and must.
        collate_fn: makes a batch of a list of samples.
        config, config_params: a dict, the path of a JSON file, or JSON text.
        mpu, mesh_param, distributed_port: not done here; leave them out.

    Raises:
        ConfigError: a sentence for each problem of the config.
        ValueError, TypeError: what is missing, or no such thing.
    """
    _refuse(mpu=mpu, mesh_param=mesh_param, distributed_port=distributed_port)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model= takes a torch.nn.Module, not {model!r}")
    source = _source(args, config, config_params)
    if dist_init_required is not False:
        init_distributed()
    elif not torch.distributed.is_initialized():
        raise RuntimeError(
            "dist_init_required is False, but the ranks cannot talk yet; "
            "call minizero.init_distributed() first, or leave it out"
        )
    settings = read(source, world_size())
    overruled = _overruled(
        settings, optimizer=optimizer, scheduler=lr_scheduler
    )
    if rank() == 0:
        for sentence in (*settings.warnings, *overruled):
            warnings.warn(sentence, stacklevel=2)
    parameters: list[Any] = list(model_parameters or model.parameters())
    made = make_optimizer(settings, optimizer, parameters)
    loader = None
    if training_data is not None:
        loader = Loader(
            training_data,
            settings.train_micro_batch_size_per_gpu,
            collate_fn,
            settings.dataloader_drop_last,
        )
    scheduler = make_scheduler(settings, lr_scheduler, made)
    if not checkpointing.is_configured():
        checkpointing.use(settings.activation_checkpointing)
    engine = Engine(settings, model, made, scheduler, loader)
    return engine, engine.optimizer, loader, scheduler


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"minizero does not do {name}={value!r}: its ranks are all "
                "data-parallel, and find each other as torchrun says; leave "
                "it out"
            )


def _overruled(config: Config, **given: Any) -> list[str]:
    """A sentence for each section that an argument takes the place of."""
    return [
        f"{name}.type = {json.dumps(getattr(config, name).type)} has no "
        f"effect: initialize was given another {name}"
        for name, value in given.items()
        if value is not None and getattr(config, name) is not None
    ]


def _source(
    args: Any, config: Source | None, config_params: Source | None
) -> Source:
    """The one config that was given."""
    given = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }
    found = {k: v for k, v in given.items() if v is not None}
    if len(found) != 1:
        those = " and ".join(found) or "none"
        raise ValueError(
            f"initialize takes one config, and got {those}; give "
            "config=..., a dict or the path of a JSON file"
        )
    return found.popitem()[1]


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Let a script take `--deepspeed` and `--deepspeed_config FILE`."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--deepspeed",
        action="store_true",
        help="for the script's own use; the engine does not look at it",
    )
    group.add_argument(
        "--deepspeed_config",
        metavar="FILE",
        help="the config, a JSON file",
    )
    return parser
