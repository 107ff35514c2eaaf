"""Forward, backward, step: the loop of a training script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .config import Config
from .facade import EngineOptimizer
from .launch import device
from .meter import Meter
from .weights import Weights
from .wiring import wrap


class Loop(Weights):
    """Micro-batches become steps: what is reduced, updated, counted when."""

    def __init__(
        self,
        config: Config,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
    ) -> None:
        super().__init__(config, model, wrap(model, optimizer, config))
        self.optimizer = EngineOptimizer(
            self.net,
            config.gradient_clipping,
            config.zero_optimization.compute_grad_norm,
        )
        self.lr_scheduler = lr_scheduler
        self.meter = Meter(config.wall_clock_breakdown)
        self.device = device()
        self.global_steps = self.global_samples = self.micro_steps = 0
        self._boundary: bool | None = None
        self._torn = False  # whether a backward or an update failed
        self._held = False  # whether inside `no_sync`
        self._applied = False

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
        """Add the gradients of a micro-batch; returns the scaled loss.

        The loss is divided by the number of micro-batches of a step, unless
        `scale_wrt_gas` is false. Gradients are averaged over ranks: at once
        where the plan shards them, else at the boundary.

        If it raises, the step begins anew: the gradients of its earlier
        micro-batches are gone too, and the next `step` does not count.
        """
        self._mend()
        check_loss(loss)
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        sharded = self.config.plan.gradients.sharded
        postponed = not (sharded or self.is_gradient_accumulation_boundary())
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
            if boundary and self.net.has_gradients:
                self._update(lr_kwargs or {})
        self.micro_steps += 1
        if boundary:
            self.count()

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        with self._tearing():
            self.optimizer.step()
        self._applied = not self.optimizer.overflow
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)

    def count(self) -> None:
        """Called at the end of a boundary's `step`."""
        self.global_steps += 1
        self.global_samples += self.train_batch_size()

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """What leaves this block by an exception leaves half a gradient."""
        self._torn = True
        yield
        self._torn = False

    def _mend(self) -> bool:
        """Drop half gradients and begin the step anew, if there are any."""
        torn, self._torn = self._torn, False
        if torn:
            self.zero_grad()
            micro_batches = self.gradient_accumulation_steps()
            self.micro_steps -= self.micro_steps % micro_batches
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

    def set_gradient_accumulation_boundary(
        self, is_boundary: bool | None
    ) -> None:
        """Say so yourself, before each backward; None counts again."""
        self._boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Whether the last `step` has updated parameters."""
        return self._applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step."""
        self.optimizer.zero_grad()


def check_loss(loss: Any) -> None:
    """Raise unless backward can start from it."""
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
