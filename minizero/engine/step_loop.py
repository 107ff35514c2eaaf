"""Micro-batches become steps, and steps become updates (chapter 13)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

from ..config import Config
from ..zero import DataParallel
from .metrics import Meter
from .optimizer import EngineOptimizer


class StepLoop:
    """Counts micro-batches, and updates after the last one of each step.

    `net`: the model in its plan. `optimizer`: None only evaluates.
    `micro_steps`: calls of `step`. `global_steps`: steps, also those that were
    skipped because gradients were not finite. `global_samples`: samples of
    all ranks in these steps.
    """

    def __init__(
        self,
        config: Config,
        net: DataParallel,
        optimizer: EngineOptimizer | None,
        scheduler: Any,
    ) -> None:
        self.config, self.net = config, net
        self.optimizer, self.lr_scheduler = optimizer, scheduler
        self.meter = Meter(config.wall_clock_breakdown)
        self.micro_steps = self.global_steps = self.global_samples = 0
        self._position = 0  # micro-batches of this step that are complete
        self._boundary: bool | None = None  # what the script has set
        self._applied = False
        self._failed = False  # whether a backward has left part of a gradient

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-batch is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        return self._position + 1 >= self.config.gradient_accumulation_steps

    def backward(
        self,
        loss: Tensor,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
    ) -> Tensor:
        """Add the gradients of a micro-batch; returns the scaled loss.

        The loss is divided by the number of micro-batches of a step, unless
        `scale_wrt_gas` is false. Gradients are averaged over ranks: now,
        where the plan shards them, else at the step's last micro-batch.
        """
        self._check_trains()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(
                "backward takes the loss, a tensor with one element, not "
                f"{tuple(loss.shape) if isinstance(loss, Tensor) else loss!r}"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss requires no gradient; compute it from the engine's "
                "output, outside of torch.no_grad()"
            )
        if scale_wrt_gas:
            loss = loss / self.config.gradient_accumulation_steps
        sharded = self.net.plan.gradients.sharded
        reduces = sharded or self.is_gradient_accumulation_boundary()
        self._failed = True
        with self.meter.phase("backward"):
            with nullcontext() if reduces else self.net.no_sync():
                self.net.backward(loss, retain_graph)
        self._failed = False
        return loss.detach()

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Call it after each micro-batch; after a step's last one it updates.

        An update clips, then lets the optimizer work, then steps the
        learning-rate scheduler (with `lr_kwargs`), unless gradients were not
        finite. Without any gradient nothing is updated.
        """
        self._check_trains()
        assert self.optimizer is not None
        if not self.net.syncing:
            raise RuntimeError("call step() outside of no_sync")
        boundary = self.is_gradient_accumulation_boundary()
        self._applied = False
        if boundary and self.net.has_gradients:
            with self.meter.phase("step"):
                self.optimizer.step()
            self._applied = not self.optimizer.overflow
        self.micro_steps += 1
        self._position = 0 if boundary else self._position + 1
        if boundary:
            self.global_steps += 1
            self.global_samples += self.config.train_batch_size
        if self._applied and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))

    def _check_trains(self) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer, so it only evaluates; give "
                "minizero.initialize one, or name one in the config"
            )
        if self._failed:
            raise RuntimeError(
                "a backward has failed, so gradients are incomplete; call "
                "engine.zero_grad() before you go on"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of this step."""
        self._failed = False
        self.net.zero_grad()
