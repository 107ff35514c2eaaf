"""What a training loop calls: backward, clipping, the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from ..deepspeed.parameters import safe_get_full_grad
from ..engine import Engine


class EngineStep(AcceleratedOptimizer):
    """The optimizer that a loop holds: its `step` is the engine's.

    Its groups are the ones of the optimizer that was prepared, so schedulers
    made of that one go on moving them.
    """

    def __init__(self, engine: Engine, hidden: dict[Tensor, Any]) -> None:
        super().__init__(engine.optimizer, device_placement=False)
        self.engine, self.hidden = engine, hidden

    def step(self, closure: Any = None) -> None:
        """Update, unless a micro-batch is still to come."""
        if self.gradient_state.sync_gradients:
            while self.hidden:  # a gradient that was set would be taken over
                p, grad = self.hidden.popitem()
                p.grad = grad
            self.engine.step()

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients were not finite; a schedule then waits."""
        return not self.engine.was_step_applied()


class Loop(accelerate.Accelerator):
    """Micro-batches, on an engine.

    `shows_gradients`: `clip_grad_norm_` leaves whole ones in `p.grad`.
    """

    engine: Engine | None = None
    shows_gradients = False
    _reduces = True
    _hidden: dict[Tensor, Any]  # what stood in `p.grad` before

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError(
                "no engine yet: call prepare with a model and its optimizer"
            )
        return self.engine

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Add the gradients of a micro-batch, and count it."""
        engine = self._engine()
        engine.set_gradient_accumulation_boundary(self._reduces)
        loss = loss / self.gradient_accumulation_steps
        engine.backward(loss, retain_graph, scale_wrt_gas=False)
        engine.set_gradient_accumulation_boundary(self.sync_gradients)
        if not self.sync_gradients:
            engine.step()

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Backward inside does not reduce, where the plan keeps gradients."""
        self._reduces, before = False, self._reduces
        try:
            yield
        finally:
            self._reduces = before

    def clip_grad_norm_(
        self,
        parameters: Iterable[Tensor],
        max_norm: float,
        norm_type: int = 2,
    ) -> Tensor:
        """Clip the gradients of the whole model; their norm before that."""
        net = self._engine().net
        trained = [p for p in net.model.parameters() if p.requires_grad]
        if norm_type != 2 or {*trained} - {*parameters}:
            raise ValueError(
                "clip_grad_norm_ takes all parameters of the model and their "
                "2-norm: a shard holds pieces of many parameters"
            )
        clips = max_norm < float("inf")
        norm = net.clip_grad_norm(max_norm) if clips else net.grad_norm()
        for p in trained if self.shows_gradients else ():
            grad = safe_get_full_grad(p)
            if grad is not None:
                self._hidden[p] = p.grad
                p.grad = net.precision.unscaled(grad).to(p.dtype)
        return norm
