"""A DeepSpeed-shaped engine: what a training script holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minizero.engine.arguments import (
    Source,
    check_model,
    overruled,
    refuse,
    the_source,
)
from minizero.engine.from_config import (
    MakeOptimizer,
    MakeScheduler,
    Parameters,
    make_optimizer,
    make_scheduler,
)

from ..activations import functions
from ..config import read
from .data import Loader
from .optimizer import EngineOptimizer
from ..ranks.launch import init_distributed, rank, world_size
from .throughput import Throughput
from .run_checkpoint import Resume


class Engine(Resume):
    """Trains a model as a config says; made by `initialize`.

    A module around `module`: calls, `train`, `eval`, `parameters` go through
    to it, names have the prefix "module.", and what the engine lacks is
    looked up in the model.

    `net`: the model in its plan. `optimizer`, `lr_scheduler`,
    `training_dataloader`: what `initialize` returns too. Without an
    optimizer it evaluates: there is `forward`, and `backward` is refused.
    `global_steps`: updates, those included that were skipped for gradients
        that were not finite (`skipped_steps`). `global_samples`: samples of
        all ranks in these. `micro_steps`: calls of `step`.
    """

    is_compiled = False

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out: gradients were not finite on a rank."""
        return self.net.precision.skipped_steps

    def count(self) -> None:
        super().count()
        self.meter.end_step(self.train_batch_size(), self.gradient_accumulation_steps())
        if rank() == 0:
            self._report()

    def _report(self) -> None:
        """Print what the config asks for; on rank 0."""
        every = self.config.steps_per_print
        if every and self.global_steps % every == 0:
            parts = [
                f"step={self.global_steps}, skipped={self.skipped_steps}",
                f"lr={self.get_lr()}, mom={self.get_mom()}",
                f"loss_scale={self._needed_optimizer().loss_scale:g}",
                str(self.meter.recent),
            ]
            print(", ".join(filter(None, parts)), flush=True)
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
        if self.optimizer is None:
            return None
        if self.optimizer.overflow:
            return float("inf")
        norm = self.optimizer.norm
        return None if norm is None else norm.item()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, for the next update."""
        return [group.get("lr", 0.0) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas; else 0.0."""
        return [
            group.get("momentum", group.get("betas", 0.0)) for group in self._groups()
        ]

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups

    def empty_partition_cache(self) -> None:
        """Free the sharded parameters that are whole; every rank calls it."""
        for unit in self.net.units:
            self.net.release(unit)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Compile the forward of each unit, but the root's; in place.

        Between them, and so outside of what is compiled, hooks gather, free
        and reduce. `compile_kwargs`: of `torch.compile`. A second call does
        nothing.
        """
        if self.is_compiled:
            return
        self.is_compiled = True
        modules = [unit.module for unit in self.net.units]
        inner = [module for module in modules if module is not self.module]
        for module in inner or modules:
            module.forward = torch.compile(
                module.forward, backend=backend, **(compile_kwargs or {})
            )

    def destroy(self) -> None:
        """Finish the save that is under way, and delete offloaded files.

        The engine is of no use afterwards; a second call does nothing.
        """
        self._over = True
        try:
            self.finish_checkpoint()
        finally:
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
) -> tuple[Engine, EngineOptimizer | None, Loader | None, Any]:
    """An engine for `model`, its optimizer, its data loader, its scheduler.

    The arguments are DeepSpeed's, in its order. What is neither given nor in
    the config is None. Without an optimizer the engine evaluates: it has no
    gradients and no optimizer state, parameters are frozen, and at stage 3
    they are sharded.

    Args:
        args: parsed arguments; `args.deepspeed_config` is the config, if
            there is one (see `add_config_arguments`).
        model: any module; parameters and buffers get rank 0's values.
        optimizer: an element-wise `torch.optim` optimizer over the model's
            parameters, or a function that makes one of `model_parameters`;
            without it the config's is made, if it names one.
        model_parameters: parameters, or groups (dicts) of them with options;
            default: all of the model.
        training_data: a dataset with `len` and `[index]`, or one that is
            iterated over; the same on every rank, which sees its part.
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
    refuse(mpu=mpu, mesh_param=mesh_param, distributed_port=distributed_port)
    check_model(model)
    assert model is not None
    source = the_source(args, config, config_params)
    if dist_init_required is not False:
        init_distributed()
    elif not torch.distributed.is_initialized():
        raise RuntimeError(
            "dist_init_required is False, but the ranks cannot talk yet; "
            "call minizero.init_distributed() first, or leave it out"
        )
    settings = read(source, world_size())
    if model_parameters is None:
        model_parameters = model.parameters()
    parameters: list[Any] = list(model_parameters)
    made = make_optimizer(settings, optimizer, parameters)
    idle = overruled(settings, optimizer=optimizer, scheduler=lr_scheduler)
    if made is None and settings.scheduler is not None:
        idle.append("scheduler has no effect: there is no optimizer")
    if rank() == 0:
        for sentence in (*settings.warnings, *idle):
            warnings.warn(sentence, stacklevel=2)
    loader = None
    if training_data is not None:
        loader = Loader(
            training_data,
            settings.train_micro_batch_size_per_gpu,
            collate_fn,
            settings.dataloader_drop_last,
        )
    scheduler = make_scheduler(settings, lr_scheduler, made)
    functions.use(settings.activation_checkpointing.cpu_checkpointing)
    engine = Engine(settings, model, made, scheduler, loader, collate_fn)
    return engine, engine.optimizer, loader, scheduler
