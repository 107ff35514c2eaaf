"""The optimizer that a training script holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..zero import DataParallel


class EngineOptimizer(torch.optim.Optimizer):
    """Stands in for the optimizer, whose parameters are shards of flat buffers now.

    `param_groups`, `defaults` and `state` are that optimizer's own objects: torch's
    learning-rate schedulers accept this one, and an option that is changed in a group
    holds from the next update on. The state is this rank's, of 1-D shards.

    `optimizer`: the one it stands in for. `norm`: of all gradients at the last update,
    before clipping; None if it was not computed. `overflow`: whether the last update
    was skipped because gradients were not finite.
    """

    def __init__(self, net: DataParallel, config: Config) -> None:
        # not `super().__init__`: groups and state are the inner optimizer's
        self.net, self.optimizer, self.config = net, net.optimizer, config
        self.norm: Tensor | None = None
        self.overflow = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    @property
    def loss_scale(self) -> float:
        """The factor of the next loss; 1.0 without fp16. Set it alike on all ranks."""
        return getattr(self.net.precision, "loss_scale", 1.0)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scaler = getattr(self.net.precision, "scaler", None)
        if scaler is None or not 0 < scale < float("inf"):
            raise ValueError(
                f"the loss scale cannot be set to {scale!r}: it is a finite number "
                "above 0, and exists with fp16 only"
            )
        scaler.scale = float(scale)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and update; `engine.step` calls this, and counts."""
        if closure is not None:
            raise ValueError("no closure: call engine.backward and engine.step")
        self.norm = None
        if self.config.gradient_clipping:
            self.norm = self.net.clip_grad_norm(self.config.gradient_clipping)
        elif self.config.zero_optimization.compute_grad_norm:
            self.norm = self.net.grad_norm()
        self.overflow = not self.net.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.net.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: flat buffers hold the groups that there were at the start."""
        raise RuntimeError("give all parameter groups to minizero.initialize")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused: the state is sharded."""
        raise RuntimeError("load optimizer states with engine.load_checkpoint(folder)")
