"""A DeepSpeed-shaped engine: what a training script holds."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..activations import CHECKPOINT, Offloaded
from ..config import Config, read
from ..config.batch import MICRO, STEPS, TOTAL
from ..config.source import Source
from ..ranks.launch import device, init_distributed, rank, world_size
from ..zero.init import GatheredParameters
from ..zero.units import Policy
from .arguments import (
    MakeOptimizer,
    MakeScheduler,
    Parameters,
    freeze_others,
    make_optimizer,
    make_scheduler,
    overruled,
    refuse,
    take_over,
    the_source,
)
from .batches import BatchFeeder
from .checks import check_alive, check_optimizer
from .data import Loader
from .delegate import REFUSED, Field, method, options
from .from_config import wrap
from .monitor import Monitor
from .optimizer import EngineOptimizer
from .own_backward import OwnBackward, asked
from .run_checkpoint import RunCheckpoint
from .step_loop import Accumulation, StepLoop
from .throughput import Meter, Throughput, profiled
from .weights import Weights


class Engine(nn.Module):
    """Trains a model as a config says; made by `initialize`.

    For each key of the config that is no section there is a method that reads it, as
    `steps_per_print()` and `zero_reduce_bucket_size()`.

    A module around `module`: calls, `train`, `eval`, `parameters` go through
    to it, names have the prefix "module.", and what the engine lacks is
    looked up in the model.

    `config`: complete; see the config reference. `net`: the model in its
    plan. `optimizer`, `lr_scheduler`, `training_dataloader`: what
    `initialize` returns too. Without an optimizer it evaluates: there is
    `forward`, and `backward` is refused. `collate_fn`: of its other loaders.
    `monitor`: writes values where the config says; so may the script.
    `global_steps`: updates, those included that were skipped for gradients
        that were not finite (`skipped_steps`). `global_samples`: samples of
        all ranks in these. `micro_steps`: calls of `step`.
    """

    module: nn.Module
    is_compiled = False

    config = Field[Config]("_steps.config")
    global_steps = Field[int]("_steps.global_steps")
    global_samples = Field[int]("_steps.global_samples")
    micro_steps = Field[int]("_steps.micro_steps")
    lr_scheduler = Field[Any]("_loop.scheduler")
    training_dataloader = Field[Loader | None]("_feeder.loader")
    collate_fn = Field[Callable[[list[Any]], Any] | None]("_feeder.collate_fn")

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        training_dataloader: Loader | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        units: Policy | None = None,
    ) -> None:
        super().__init__()
        zero = config.zero_optimization
        self.net = net = wrap(model, optimizer, config, units)
        self.module, self.device = model, device()
        clips, norm = config.gradient_clipping, zero.compute_grad_norm
        updates, trains = EngineOptimizer(net, clips, norm), optimizer is not None
        self.optimizer = updates if trains else None
        self.meter = self.tput_timer = Meter(config.wall_clock_breakdown)
        self.monitor, self._loss = Monitor(config), 0.0
        self._steps = Accumulation(config)
        self._loop = StepLoop(net, self._steps, updates, lr_scheduler, self.meter)
        self._own = OwnBackward(self._loop)
        self._feeder = BatchFeeder(self._loop, training_dataloader, collate_fn)
        gathers = zero.stage3_gather_16bit_weights_on_model_save
        self._weights = Weights(model, net, gathers)
        self._run = RunCheckpoint(self._loop, self._feeder, trains)
        self.global_rank, self.world_size = rank(), world_size()
        self.dp_world_size = world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            if name in REFUSED:
                raise AttributeError(
                    f"minizero's engine has no {name}: {REFUSED[name]}"
                ) from None
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; with fp16 or bf16, of inputs in that dtype."""
        self._loop.begin()
        training = torch.is_grad_enabled()
        with self.meter.phase("forward") if training else nullcontext():
            with self._profiling():
                return self.net(*args, **kwargs)

    def _profiling(self) -> AbstractContextManager[None]:
        asks, steps = self.config.flops_profiler, self.global_steps
        if asks.enabled and steps == asks.profile_step and not self.position():
            if rank() == 0:
                return profiled(asks.module_depth, asks.output_file)
        return nullcontext()

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Add the gradients of a micro-batch; returns the scaled loss.

        The loss is divided by the number of micro-batches of a step, unless
        `scale_wrt_gas` is false. Gradients are averaged over ranks: at once
        where the plan shards them, else at the boundary.

        If it raises, the step begins anew: the gradients of its earlier
        micro-batches are gone too, and the next `step` does not count.
        RuntimeError without an optimizer.

        `loss.backward()` does the same, where no loss scale is needed; with one,
        `engine.scale(loss).backward()`.
        """
        self._check_trains()
        with asked():
            share = self._loop.backward(loss, retain_graph, scale_wrt_gas)
        if self.monitor.enabled:
            self._loss += share.item()
        return share

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Call it after each micro-batch; at the boundary it updates.

        Then it clips, updates, and steps the scheduler (with `lr_kwargs`) if
        the update was not skipped. Without any gradient nothing is updated.
        RuntimeError without an optimizer, TypeError if the scheduler needs
        other `lr_kwargs`; then nothing has happened.
        """
        self._check_trains()
        if not self.net.syncing:
            raise RuntimeError(
                "step() inside no_sync would update with gradients of this "
                "rank alone; call it after the block"
            )
        before = self.global_steps
        try:
            self._loop.step(lr_kwargs or {})
        finally:
            if self.global_steps > before:
                self._report()

    def _check_trains(self) -> None:
        check_alive(self._loop.over, self.net)
        check_optimizer(self.optimizer)

    def _report(self) -> None:
        """A step has ended: time it, and print what the config asks for."""
        config = self.config
        micro_batches = config.gradient_accumulation_steps
        self.meter.end_step(config.train_batch_size, micro_batches)
        if rank() != 0:
            return
        assert self.optimizer is not None
        if self.monitor.enabled:
            seen = {"train_loss": self._loss, "lr": self.get_lr()[0]}
            if config.fp16.enabled:
                seen["loss_scale"] = self.optimizer.loss_scale
            self._loss, samples = 0.0, self.global_samples
            self.monitor.write_events(
                (f"Train/Samples/{name}", value, samples)
                for name, value in seen.items()
            )
        every = config.steps_per_print
        if every and self.global_steps % every == 0:
            parts = [
                f"step={self.global_steps}, skipped={self.skipped_steps}",
                f"lr={self.get_lr()}, mom={self.get_mom()}",
                f"loss_scale={self.optimizer.loss_scale:g}",
                str(self.meter.recent),
            ]
            print(", ".join(filter(None, parts)), flush=True)
            self.meter.reset()
        if config.wall_clock_breakdown:
            print(f"step={self.global_steps}, {self.meter.last}", flush=True)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside does not reduce; the next one outside does.

        Raises RuntimeError where the plan shards gradients (stages 2 and 3).
        """
        if not self.net.syncing:
            raise RuntimeError("no_sync is inside no_sync; leave one out")
        return self.net.no_sync()

    scale = method("_own", OwnBackward.scale)
    position = method("_steps", Accumulation.position)
    is_gradient_accumulation_boundary = method("_steps", Accumulation.is_boundary)
    set_gradient_accumulation_boundary = method("_steps", Accumulation.set_boundary)
    set_train_batch_size = method("_feeder", BatchFeeder.set_train_batch_size)
    set_train_micro_batch_size = method(
        "_feeder", BatchFeeder.set_train_micro_batch_size
    )
    deepspeed_io = method("_feeder", BatchFeeder.loader_of)
    save_checkpoint = method("_run", RunCheckpoint.save)
    finish_checkpoint = method("_run", RunCheckpoint.finish)
    load_checkpoint = method("_run", RunCheckpoint.load)
    module_state_dict = method("_weights", Weights.state_dict)
    # under this name Hugging Face's Trainer and Accelerate ask for it
    _zero3_consolidated_16bit_state_dict = module_state_dict
    save_16bit_model = method("_weights", Weights.save)

    def get_batch_info(self) -> tuple[int, int, int]:
        """The three sizes: of a step, of a micro-batch, and the steps."""
        return tuple(getattr(self.config, name) for name in (TOTAL, MICRO, STEPS))

    def optimizer_name(self) -> str | None:
        """The class of the optimizer in it."""
        made = self.optimizer
        return None if made is None else type(made.optimizer).__name__

    def get_data_parallel_rank(self) -> int:
        """This rank: all of them are data-parallel."""
        return self.global_rank

    @property
    def data_parallel_group(self) -> Any:
        """Torch's group of all ranks."""
        return torch.distributed.group.WORLD

    def dynamic_loss_scale(self) -> bool:
        """Whether there is a loss scale that adapts itself."""
        return self.config.fp16.enabled and not self.config.fp16.loss_scale

    @property
    def skipped_steps(self) -> int:
        """Steps that were left out: gradients were not finite on a rank."""
        return self.net.precision.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step` has updated parameters."""
        return self._loop.applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step, or make them zeros."""
        self.net.zero_grad(set_to_none)

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

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights, names with the prefix "module."; rank 0's count.

        All ranks must call it. The whole model is gathered meanwhile; to go
        on with training, `load_checkpoint` needs less memory.
        """
        if assign:
            raise ValueError(
                "parameters are views of flat buffers, so values are copied; "
                "leave assign=True out"
            )
        with GatheredParameters(self.module.parameters(), modifier_rank=0):
            return super().load_state_dict(state_dict, strict)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., None] | None = None,
        fetch_z3_params: bool = False,
    ) -> None:
        """The same, names without that prefix; sharded parameters are fetched anyway.

        `custom_load_fn`: called with `src=state_dict, dst=engine.module` instead.
        """
        if custom_load_fn is None:
            named = {f"module.{name}": value for name, value in state_dict.items()}
            self.load_state_dict(named, strict)
            return
        with GatheredParameters(self.module.parameters(), modifier_rank=0):
            custom_load_fn(src=state_dict, dst=self.module)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        """What `to`, `half`, `cuda` call: only if there is nothing to do."""
        self._weights.check_in_place(fn, self.module)
        return self

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
        modules = [module for unit in self.net.units for module in unit.modules]
        inner = [module for module in modules if module is not self.module]
        for module in inner or modules:
            module.forward = torch.compile(
                module.forward, backend=backend, **(compile_kwargs or {})
            )

    def destroy(self) -> None:
        """Finish the save that is under way, and delete offloaded files.

        The engine is of no use afterwards; a second call does nothing.
        """
        self._loop.over = True
        try:
            self.finish_checkpoint()
        finally:
            close = getattr(self.net.home, "close", None)
            if close is not None:
                close()


for _name, _method in options():
    setattr(Engine, _name, _method)


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
    units: Policy | None = None,
) -> tuple[Engine, EngineOptimizer | None, Loader | None, Any]:
    """An engine for `model`, its optimizer, its data loader, its scheduler.

    The arguments are DeepSpeed's, in its order, and `units`. What is neither given nor in
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
        units: says of a module whether it communicates as one, as a unit;
            default: the members of `nn.ModuleList` and `nn.Sequential`.
        mpu, mesh_param, distributed_port: not done here; leave them out.

    Raises:
        ConfigError: a sentence for each problem of the config.
        ValueError, TypeError: what is missing, or no such thing.
    """
    refuse(mpu=mpu, mesh_param=mesh_param, distributed_port=distributed_port)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model= takes a torch.nn.Module, not {model!r}")
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
    made = make_optimizer(settings, optimizer, model, [*model_parameters])
    idle = overruled(settings, optimizer=optimizer, scheduler=lr_scheduler)
    if made is None and settings.scheduler is not None:
        idle.append("scheduler has no effect: there is no optimizer")
    loader = None
    if training_data is not None:
        loader = Loader(
            training_data,
            settings.train_micro_batch_size_per_gpu,
            collate_fn,
            settings.dataloader_drop_last,
        )
    scheduler = make_scheduler(settings, lr_scheduler, made)
    if settings.activation_checkpointing.cpu_checkpointing:
        CHECKPOINT.store = Offloaded()
    changed = [None if made is None else freeze_others(model, made), take_over(model)]
    if rank() == 0:
        for sentence in filter(None, (*settings.warnings, *idle, *changed)):
            warnings.warn(sentence, stacklevel=2)
    engine = Engine(settings, model, made, scheduler, loader, collate_fn, units)
    return engine, engine.optimizer, loader, scheduler
