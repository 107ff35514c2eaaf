"""`accelerate`'s Accelerator, with an engine in the place of DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from torch.optim import Optimizer

from ..config.source import Source
from ..engine import Engine, initialize
from ..ranks import init_distributed
from ..ranks.launch import world_size
from .config import ZeroConfig
from .environment import check_adapters, keep_in_step, plain_cpu
from .loop import EngineStep
from .state import State


class Accelerator(State):
    """Trains as a DeepSpeed config says; what is not here is `accelerate`'s.

    `config`: a dict, the path of a JSON file, or JSON text; or a function
    that makes the dict for a model.
    """

    config: Source | Callable[[nn.Module], dict[str, Any]]

    def __init__(self, config: Source, **options: Any) -> None:
        if options.get("mixed_precision", "no") != "no":
            raise ValueError(
                f"mixed_precision={options['mixed_precision']!r} would cast "
                'beside the engine; enable "fp16" or "bf16" in the config'
            )
        init_distributed()
        with plain_cpu():
            options["mixed_precision"] = "no"
            options.setdefault("cpu", not torch.cuda.is_available())
            super().__init__(**options)
        self.config = config

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As `accelerate`'s; a model comes with its optimizer."""
        models = [o for o in objects if isinstance(o, nn.Module)]
        optimizers = [o for o in objects if isinstance(o, Optimizer)]
        if models and not isinstance(models[0], Engine):
            if len(models) != 1 or len(optimizers) != 1:
                raise ValueError(
                    f"prepare was given {len(models)} models and "
                    f"{len(optimizers)} optimizers; give it one of each: the "
                    "optimizer updates shards of the model"
                )
            start(self, models[0], optimizers[0], objects)
        return super().prepare(*objects, device_placement=device_placement)

    def prepare_model(self, model: Any, *_: Any, **__: Any) -> Engine:
        """The engine; `accelerate`'s own would move and copy parameters."""
        self.engine = model if isinstance(model, Engine) else self.engine
        if model not in (self._engine(), self._engine().module):
            raise ValueError("give prepare a model and its optimizer at once")
        if self.engine not in self._models:
            self._models.append(self.engine)
        return self._engine()

    def prepare_optimizer(self, made: Any, *_: Any, **__: Any) -> EngineStep:
        """What steps the engine."""
        if isinstance(made, EngineStep):
            self.engine, self._hidden = made.engine, made.hidden
        else:
            self._hidden = {}
            made = EngineStep(self._engine(), self._hidden)
        self._optimizers.append(made)
        return made


def start(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    objects: tuple[Any, ...] = (),
) -> None:
    """Make the accelerator's engine, unless there is one for the model."""
    engine, config = accelerator.engine, accelerator.config
    if engine is not None and engine.module is model:
        if getattr(optimizer, "engine", None) is engine:
            return
    elif engine is not None:
        engine.destroy()
    check_adapters(model)
    if callable(config):
        config = config(model)
    else:
        filled = ZeroConfig(config)
        filled.config.setdefault("gradient_clipping", 0.0)
        micro_batches = accelerator.gradient_accumulation_steps
        filled.fill("gradient_accumulation_steps", micro_batches)
        for loader in objects:
            if getattr(loader, "batch_size", None):
                size = loader.batch_size
                filled.fill("train_micro_batch_size_per_gpu", size)
        config = filled.for_engine()
    engine = initialize(model=model, optimizer=optimizer, config=config)[0]
    plugin = accelerator.state.dynamo_plugin
    if plugin.backend != DynamoBackend.NO:
        options = plugin.to_kwargs()
        engine.compile(options.pop("backend"), options)
    if engine.zero_optimization_partition_weights() and world_size() > 1:
        keep_in_step(model)
    accelerator.engine = engine
