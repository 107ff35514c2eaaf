"""A DeepSpeed-shaped engine: what a training script holds."""

from __future__ import annotations

import os
import warnings
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config, read
from .data import Loader
from .facade import EngineOptimizer
from .launch import device, init_distributed, rank, world_size
from .meter import Meter
from .weights import Weights
from .wiring import (
    MakeOptimizer,
    MakeScheduler,
    Parameters,
    make_optimizer,
    make_scheduler,
    wrap,
)

Source = str | os.PathLike[str] | Mapping[str, Any]


class Engine(Weights):
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

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        training_dataloader: Loader | None,
    ) -> None:
        super().__init__(config, model, wrap(model, optimizer, config))
        self.optimizer = EngineOptimizer(
            self.net,
            config.gradient_clipping,
            config.zero_optimization.compute_grad_norm,
        )
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self.meter = Meter(config.wall_clock_breakdown)
        self.device = device()
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._boundary: bool | None = None
        self._gradients = False  # whether a backward came since the update
        self._torn = False  # whether a backward or an update failed
        self._held = False  # whether inside `no_sync`
        self._applied = False

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out: gradients were not finite on a rank."""
        return self.net.precision.skipped_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; with fp16 or bf16, of inputs in that dtype."""
        self._mend()
        training = torch.is_grad_enabled()
        with self.meter.phase("forward") if training else nullcontext():
            return self.net(*args, **kwargs)

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Add the gradients of a micro-batch's loss; returns the loss, scaled.

        The loss is divided by the number of micro-batches of a step, unless
        `scale_wrt_gas` is false. Gradients are averaged over ranks: at once
        where the plan shards them, else at the boundary.

        If it raises, the step begins anew: the gradients of its earlier
        micro-batches are gone too, and the next `step` does not count.
        """
        self._mend()
        _check_loss(loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        sharded = self.config.plan.gradients.sharded
        postponed = not (sharded or self.is_gradient_accumulation_boundary())
        self._gradients = True
        with self._tearing(), self.meter.phase("backward"):
            with self.net.no_sync() if postponed else nullcontext():
                self.net.backward(loss, retain_graph)
        return loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Call it after each micro-batch; at the boundary it updates.

        Then it clips, updates, and steps the scheduler (with `lr_kwargs`) if
        the update was not skipped. Without any gradient nothing is updated.
        """
        if self._held:
            raise RuntimeError(
                "step() inside no_sync would update with gradients of this "
                "rank alone; call it after the block"
            )
        self._applied = False
        if self._mend():
            return
        boundary = self.is_gradient_accumulation_boundary()
        with self.meter.phase("step"):
            if boundary and self._gradients:
                self._update(lr_kwargs or {})
        self.micro_steps += 1
        if boundary:
            self._count()

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        with self._tearing():
            self.optimizer.step()
        self._gradients = False
        self._applied = not self.optimizer.overflow
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def _count(self) -> None:
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
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

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """What leaves this block by an exception leaves half a gradient."""
        self._torn = True
        yield
        self._torn = False

    def _mend(self) -> bool:
        """Drop half gradients, and begin the step anew; whether there were."""
        torn = self._torn
        if torn:
            self._torn = False
            self.zero_grad()
            self.micro_steps -= (
                self.micro_steps % self.gradient_accumulation_steps()
            )
        return torn

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside does not reduce; the next one outside does.

        Raises RuntimeError where the plan shards gradients (stages 2 and 3).
        """
        if self._held:
            raise RuntimeError("no_sync is inside no_sync; leave one out")
        with self.net.no_sync():
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        number = self.micro_steps + 1
        return number % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say so yourself, from now on, before each backward."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step` has updated parameters."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step."""
        self.optimizer.zero_grad()
        self._gradients = False

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
        """The learning rate of each parameter group."""
        return [group.get("lr", 0.0) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas; else 0.0."""
        return [
            group.get("momentum", group.get("betas", 0.0))
            for group in self._groups()
        ]

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(
            "backward takes the loss, a tensor with one element, not a "
            f"{type(loss).__name__}"
        )
    if loss.numel() != 1:
        raise ValueError(
            "backward takes the loss, a tensor with one element, not one of "
            f"shape {tuple(loss.shape)}; take its mean or sum first"
        )
    if not loss.requires_grad:
        raise ValueError(
            "the loss requires no gradient; compute it outside of "
            "torch.no_grad(), from the engine's output"
        )


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
    for sentence in settings.warnings if rank() == 0 else ():
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
