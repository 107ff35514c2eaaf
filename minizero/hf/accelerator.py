"""`accelerate`'s Accelerator, with an engine in the place of DDP."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DynamoBackend
from torch import Tensor, nn
from torch.optim import Optimizer

from ..config import Source, load
from ..engine import Engine, initialize
from ..ranks import device, init_distributed, world_size
from .calls import EngineCalls


def plain_cpu() -> AbstractContextManager[Any]:
    """The environment in which `accelerate` starts: this rank's threads and device.

    Else it would choose another number of threads, and name a CPU "cpu:0"; then
    `.to("cpu:0")` copies every tensor that is on "cpu".
    """
    ours = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    if device().type == "cpu":
        ours["ACCELERATE_TORCH_DEVICE"] = "cpu"
    return patch.dict(os.environ, ours)


class EngineStep(AcceleratedOptimizer):
    """What `prepare` returns for an optimizer; Accelerate's loop calls its methods."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine = engine

    def step(self, closure: Any = None) -> None:
        """Update, unless a micro-batch is still to come."""
        if self.gradient_state.sync_gradients:
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the engine skipped its last update, since gradients overflowed."""
        return not self.engine.was_step_applied()


class Accelerator(EngineCalls):
    """Trains as a DeepSpeed config says; `accelerate` calls what has no caller here.

    `config`: a dict, a path or JSON text, or a function that makes the dict for a model.
    Sizes of batches that it leaves out are the loop's.
    """

    config: Any  # a source; `TrainerMixin` sets a function

    def __init__(self, config: Source, **options: Any) -> None:
        if (mixed := options.pop("mixed_precision", "no")) != "no":
            raise ValueError(
                f"mixed_precision={mixed!r} would cast beside the engine; enable "
                '"fp16" or "bf16" in the config'
            )
        init_distributed()
        with plain_cpu():
            options.setdefault("cpu", not torch.cuda.is_available())
            super().__init__(mixed_precision="no", **options)
        self.config = config

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As `accelerate`'s; a model comes with its optimizer."""
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer)]
        if models and not isinstance(models[0], Engine):
            if len(models) != 1 or len(optimizers) != 1 or self.engine is not None:
                raise ValueError(
                    f"prepare got {len(models)} models and {len(optimizers)} optimizers; "
                    "give it one of each, once: the optimizer updates shards of the "
                    "model, and another model needs another accelerator"
                )
            self._start(models[0], optimizers[0], objects)
        return super().prepare(*objects, device_placement=device_placement)

    def _start(self, model: nn.Module, optimizer: Any, objects: Any) -> None:
        """Make the engine of this model and optimizer, and compile it, if asked to."""
        make = self.config
        config = make(model) if callable(make) else self._loop_config(objects)
        self.engine = initialize(model=model, optimizer=optimizer, config=config)[0]
        plugin = self.state.dynamo_plugin
        if plugin.backend != DynamoBackend.NO:
            options = plugin.to_kwargs()
            self.engine.compile(options.pop("backend"), options)

        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            """The model's own; a rank whose texts are finished still joins gathers."""
            return type(model).generate(model, *args, **{**kwargs, "synced_gpus": True})

        sharded = self.engine.net.plan.parameters.sharded and world_size() > 1
        if sharded and hasattr(model, "generate"):
            model.generate = MethodType(generate, model)  # type: ignore[assignment]

    def _loop_config(self, objects: tuple[Any, ...]) -> dict[str, Any]:
        """The config of a hand-written loop, with the loop's sizes where it has none."""
        config = {k: v for k, v in load(self.config)[0].items() if v != "auto"}
        steps = self.gradient_accumulation_steps
        configured = config.setdefault("gradient_accumulation_steps", steps)
        if steps not in (1, configured):
            raise ValueError(
                f"the accelerator was given gradient_accumulation_steps={steps}, and "
                f"the config {configured}; give one of them"
            )
        self.gradient_accumulation_steps = configured
        config.setdefault("gradient_clipping", 0.0)
        sizes = [size for o in objects if (size := getattr(o, "batch_size", None))]
        if sizes:
            config.setdefault("train_micro_batch_size_per_gpu", sizes[0])
        return config

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Engine:
        """The engine; `accelerate`'s own would move and copy parameters."""
        self.engine = model if isinstance(model, Engine) else self.engine
        if self.engine not in self._models:
            self._models.append(self.engine)
        return self._engine()

    def prepare_optimizer(self, made: Any, *_: Any, **__: Any) -> EngineStep:
        """The optimizer whose `step` is the engine's."""
        if not isinstance(made, EngineStep):
            made = EngineStep(self._engine())
        self._optimizers.append(made)
        return made

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: int = 2
    ) -> Tensor:
        """Clip the gradients of the model; returns their norm before that."""
        net = self._engine().net
        trained = {p for p in net.model.parameters() if p.requires_grad}
        if norm_type != 2 or trained - {*parameters}:
            raise ValueError(
                "clip_grad_norm_ takes all parameters of the model and their 2-norm: a "
                "shard holds pieces of many parameters"
            )
        return net.clip_grad_norm(max_norm) if max_norm < torch.inf else net.grad_norm()

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The model that the engine trains."""
        model = model.module if isinstance(model, Engine) else model
        return super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """Full weights, of sharded ones on rank 0 only; all ranks call it."""
        engine = self.engine
        if engine is not None and model in (engine, engine.module):
            return engine.module_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: Any = None, *args: Any, **kw: Any) -> Any:
        """The engine saves the run, `accelerate` the rest; on all ranks."""
        with patch.multiple(self, _models=[], _optimizers=[]):
            folder = super().save_state(output_dir, *args, **kw)
        self._engine().save_checkpoint(folder)
        return folder

    def load_state(self, input_dir: Any, *args: Any, **kw: Any) -> None:
        """The inverse, under any plan."""
        with patch.multiple(self, _models=[], _optimizers=[]):
            super().load_state(input_dir, *args, **kw)
        self._engine().load_checkpoint(input_dir)
