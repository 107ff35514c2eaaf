"""What an accelerator hands out of its engine, saves and loads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ..engine import Engine
from .loop import Loop


class State(Loop):
    """The engine has the model and the optimizer; the rest is `accelerate`'s."""

    _models: list[Any]
    _optimizers: list[Any]

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The model that the engine trains."""
        model = model.module if isinstance(model, Engine) else model
        return super().unwrap_model(model, *args, **kwargs)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights; if they are sharded, on rank 0, and {} on the others.

        Every rank calls it.
        """
        engine = self.engine
        if engine is not None and model in (engine, engine.module):
            return engine.module_state_dict()
        return super().get_state_dict(model, unwrap)

    def save_state(self, output_dir: str | None = None, *args: Any, **kw: Any) -> Any:
        """The engine saves the run, `accelerate` the rest; every rank calls it."""
        with self._engine_apart() as engine:
            folder = super().save_state(output_dir, *args, **kw)
        engine.save_checkpoint(folder)
        return folder

    def load_state(self, input_dir: str, *args: Any, **kw: Any) -> None:
        """The inverse, under any plan."""
        with self._engine_apart() as engine:
            super().load_state(input_dir, *args, **kw)
        engine.load_checkpoint(input_dir)

    @contextmanager
    def _engine_apart(self) -> Iterator[Engine]:
        engine, models, optimizers = self._engine(), self._models, self._optimizers
        self._models, self._optimizers = [], []
        try:
            yield engine
        finally:
            self._models, self._optimizers = models, optimizers

    def free_memory(self, *objects: Any) -> Any:
        """As `accelerate`'s: the engine ends with those who hold it."""
        self.engine = None
        return super().free_memory(*objects)

    def clip_grad_value_(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Not here."""
        raise ValueError("gradients are clipped by their norm: call clip_grad_norm_")
