"""The engine: what a training script holds, with DeepSpeed's interface."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..comm import agreeing
from ..config import MICRO, STEPS, TOTAL, Config
from ..ranks import device, rank, world_size
from ..zero import DataParallel
from .data import Loader
from .optimizer import EngineOptimizer
from .step_loop import StepLoop

# Methods of DeepSpeed's engine that read the config, and the attribute that they read.
# Each key at the top has one too, as `train_batch_size()`.
_OPTIONS = {
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "zero_optimization": "plan.optimizer.sharded",
    "zero_optimization_partition_gradients": "plan.gradients.sharded",
    "zero_optimization_partition_weights": "plan.parameters.sharded",
    "zero_optimization_stage": "zero_optimization.stage",
    "zero_gather_16bit_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}


class Engine(StepLoop, nn.Module):
    """Trains a model as a config says; made by `initialize`.

    `StepLoop` counts and updates; this class adds the rest of DeepSpeed's interface.
    A module around `module`: calls, `train`, `eval` and `parameters` go through to it,
    its names have the prefix "module.", and what the engine lacks is looked up in it. A
    key at the top of the config is a method, `steps_per_print()`, except `optimizer`;
    `zero_optimization()` says whether the optimizer is sharded.

    `config`: complete; see the config reference. `net`: the model in its plan.
    `optimizer`, `lr_scheduler`, `training_dataloader`: as `initialize` returns them.
    Without an optimizer it evaluates only.
    """

    module: nn.Module

    def __init__(
        self,
        config: Config,
        net: DataParallel,
        optimizer: EngineOptimizer | None,
        scheduler: Any,
        loader: Loader | None,
    ) -> None:
        nn.Module.__init__(self)
        StepLoop.__init__(self, config, net, optimizer, scheduler)
        self.module, self.device = net.model, device()
        self.training_dataloader = loader
        self._reported = 0, time.perf_counter()  # of the last report: step and time
        self.is_compiled = self._destroyed = False
        self.global_rank, self.world_size = rank(), world_size()
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank()))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # parameters and modules
        except AttributeError:
            if "module" not in self.__dict__.get("_modules", {}):
                raise
        if name in _OPTIONS or name in Config.model_fields:
            return partial(attrgetter(_OPTIONS.get(name, name)), self.config)
        return getattr(self.module, name)

    # ---- training: forward, and what goes with `backward` and `step`

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward; with fp16 or bf16, of inputs in that dtype."""
        self._check(trains=False)
        return self.net(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        self._check(trains=True)
        return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        self._check(trains=True)
        if not self.net.syncing:
            raise RuntimeError("call step() outside of no_sync")
        before = self.global_steps
        super().step(lr_kwargs)
        if self.global_steps > before:
            self._report()

    def _check(self, trains: bool) -> None:
        """Raise RuntimeError if the engine cannot go on, or cannot train."""
        if self._destroyed:
            raise RuntimeError("this engine was destroyed; make a new one")
        if trains and self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer, so it only evaluates; give "
                "minizero.initialize one, or name one in the config"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear this step's gradients; its micro-batches so far stay counted."""
        self.net.zero_grad()

    def _report(self) -> None:
        """Print progress as often as the config asks; samples are those of all ranks."""
        config, every = self.config, self.config.steps_per_print
        if rank() != 0 or not every or self.global_steps % every:
            return
        (step, before), now = self._reported, time.perf_counter()
        speed = (self.global_steps - step) * config.train_batch_size / (now - before)
        self._reported = self.global_steps, now
        assert self.optimizer is not None
        print(
            f"step={self.global_steps}, skipped={self.skipped_steps}, "
            f"lr={self.get_lr()}, mom={self.get_mom()}, "
            f"loss_scale={self.optimizer.loss_scale:g}, samples/s={speed:.4g}",
            flush=True,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward inside does not reduce; the next one outside does.

        Raises RuntimeError where the plan shards gradients (stages 2 and 3).
        """
        return self.net.no_sync()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say before each backward if it ends the step; None: the engine counts."""
        self._boundary = is_boundary

    # ---- what a script asks for

    @property
    def skipped_steps(self) -> int:
        """Steps without an update: gradients were not finite on a rank."""
        return self.net.precision.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step` has updated parameters."""
        return self._applied

    def get_global_grad_norm(self) -> float | None:
        """The 2-norm of all gradients at the last update, before clipping.

        inf if the update was skipped. None before the first one, and where the config
        neither clips nor has `compute_grad_norm`.
        """
        if self.optimizer is None:
            return None
        if self.optimizer.overflow:
            return float("inf")
        norm = self.optimizer.norm
        return None if norm is None else norm.item()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group, for the next update."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("lr", 0.0) for group in groups]

    def get_mom(self) -> list[Any]:
        """The momentum of each parameter group, or its betas; else 0.0."""
        groups = self.optimizer.param_groups if self.optimizer else []
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step and of a micro-batch, and micro-batches of a step."""
        return tuple(getattr(self.config, name) for name in (TOTAL, MICRO, STEPS))

    # ---- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
        background: bool = False,
    ) -> bool:
        """Save the run as `save_dir/tag`; every rank calls it, between steps.

        Weights, optimizer states and options, loss scale, scheduler, counters, the
        place in the data, random states of every rank, and rank 0's `client_state`:
        numbers, strings, tensors, lists and dicts of them.

        `tag`: default "global_step" and the number. `save_latest`: whether
        `load_checkpoint` without a tag finds it. `exclude_frozen_parameters`: no
        effect, a checkpoint has the whole model. `keep`, `background`: see
        `minizero.checkpoint.save`; `minizero.checkpoint.finish` waits for the latter.

        CheckpointError, on all ranks, if it cannot be written, or if a step is under
        way; existing checkpoints stay as they are.
        """
        self._check(trains=False)
        steps, samples = self.global_steps, self.global_samples
        engine: dict[str, Any] = {"steps": steps, "samples": samples}
        for name, part in self._parts().items():
            engine[name] = (type(part).__name__, part.state_dict())
        checkpoint.save(
            self.net,
            save_dir,
            str(tag or f"global_step{steps}"),
            extra={"engine": engine, "client": client_state or {}},
            keep=keep,
            background=background,
            latest=save_latest,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what `save_checkpoint` saved, on any ranks under any plan.

        Every rank calls it. Returns the checkpoint's folder and the client's state;
        None, None and a warning if `load_dir` has no checkpoint and no tag is given.

        CheckpointError, on all ranks, for what is damaged, missing, or of another
        model, scheduler or data; the run is then as it was.
        """
        self._check(trains=False)
        if tag is None and not checkpoint.exists(load_dir):
            if rank() == 0:
                warnings.warn(f"no checkpoint in {load_dir}", stacklevel=2)
            return None, None
        parts = {} if load_module_only else self._parts()
        load_optimizer_states &= not load_module_only
        if not load_lr_scheduler_states:
            parts.pop("scheduler", None)

        def check(loaded: checkpoint.Loaded) -> None:
            """Raise ValueError unless each part can go on from its saved state."""
            saved = loaded.extra.get("engine", {})
            for name, part in parts.items():
                kind, state = saved.get(name, (type(part).__name__, None))
                if kind != type(part).__name__:
                    raise ValueError(
                        f"the {name} is a {type(part).__name__} and was a {kind}; "
                        "load_lr_scheduler_states=False loads without it"
                    )
                if isinstance(part, Loader) and state:
                    part.check_state(state)

        loaded = checkpoint.load(
            self.net,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=bool(load_optimizer_states and self.optimizer),
            check=check,
        )
        self.zero_grad()
        self._position = 0
        if self.optimizer is not None:
            self.optimizer.norm, self.optimizer.overflow = None, False
        saved = loaded.extra.get("engine")
        if saved is None:  # `minizero.checkpoint.save` wrote it, without an engine
            return str(loaded.path), loaded.extra
        if not load_module_only:
            self.global_steps, self.global_samples = saved["steps"], saved["samples"]
            steps = self.config.gradient_accumulation_steps
            self.micro_steps = self.global_steps * steps
            self._reported = self.global_steps, time.perf_counter()
        for name, part in parts.items():
            if name in saved:
                part.load_state_dict(saved[name][1])
        return str(loaded.path), loaded.extra["client"]

    def _parts(self) -> dict[str, Any]:
        """What else has a state: the scheduler and the loader, if there are any."""
        parts = {"scheduler": self.lr_scheduler, "data": self.training_dataloader}
        return {name: part for name, part in parts.items() if part is not None}

    # ---- weights

    def module_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Tensor]:
        """The model's whole state dict, without the prefix "module.".

        Where parameters are sharded: copies in host memory on rank 0, and {} on other
        ranks. Else, on every rank, the model's own tensors. All ranks must call it.
        """
        self.net.synchronize()
        if self.net.plan.parameters.sharded:
            return self.net.state_dict(frozen=not exclude_frozen_parameters)
        found = self.module.state_dict()
        for name, p in self.module.named_parameters(remove_duplicate=False):
            if exclude_frozen_parameters and not p.requires_grad:
                del found[name]
        return found

    # Hugging Face's Trainer and Accelerate call it by this name
    _zero3_consolidated_16bit_state_dict = module_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the whole model's weights, in their dtype, for `torch.load`, on rank 0.

        Every rank calls it, because parameters that are sharded are gathered for it.
        """
        weights = self.module_state_dict(exclude_frozen_parameters)
        with agreeing(checkpoint.CheckpointError):
            if rank() == 0:
                path = Path(save_dir, save_filename)
                path.parent.mkdir(parents=True, exist_ok=True)
                torch.save(weights, path)
        return True

    # ---- the module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Engine:
        """Overrides what `to`, `half` and `cuda` call: flat buffers must not move."""
        for t in (*self.module.parameters(), *self.module.buffers()):
            moved = fn(t)
            if moved.dtype != t.dtype or moved.device.type != t.device.type:
                raise RuntimeError(
                    f"the parameters are views of flat buffers on {self.device}; move "
                    "or cast the model before minizero.initialize, or choose its dtype "
                    "in the config (fp16, bf16)"
                )
        return self

    def empty_partition_cache(self) -> None:
        """Free the sharded parameters that are gathered; every rank calls it."""
        for unit in self.net.units:
            self.net.release(unit)

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Compile the forward of each unit in place; the root's only if it is alone.

        Hooks gather, free and reduce between units, outside of what is compiled.
        """
        if self.is_compiled:
            return
        self.is_compiled = True
        root, *blocks = [unit.module for unit in self.net.units]
        for module in blocks or [root]:
            module.forward = torch.compile(
                module.forward, backend=backend, **(compile_kwargs or {})
            )

    def destroy(self) -> None:
        """Finish a background save and delete offloaded files; nothing works after."""
        self._destroyed = True
        try:
            checkpoint.finish()
        finally:
            self.net.storage.close()
