"""The optimizer that a script holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..precision import DynamicLossScale
from ..zero.data_parallel import DataParallel


class EngineOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer whose parameters are now rows of buffers.

    Its `param_groups`, `defaults` and `state` are that optimizer's own
    objects, so learning-rate schedulers of torch take it, and an option that
    is changed in a group holds from the next update on. `state` has what
    this rank owns, for 1-D rows of buffers.

    `optimizer`: that one. `norm`: of all gradients at the last update, before clipping; None if it
    was not computed. `overflow`: whether the last update was left out, since
    gradients were not finite.
    """

    def __init__(self, net: DataParallel, clipping: float, with_norm: bool) -> None:
        # not `super`: everything that it would make is the inner one's
        self.net, self.optimizer = net, net.optimizer
        self.clipping, self.with_norm = clipping, with_norm
        self.forget()

    def forget(self) -> None:
        """There was no update yet, or none since a run was loaded."""
        self.norm: Tensor | None = None
        self.overflow = False

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # on the way out of a pickle
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied with; 1.0 without a scale.

        It can be set, on every rank alike, where there is a scale.
        """
        return getattr(self.net.precision, "loss_scale", 1.0)

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        scaler = getattr(self.net.precision, "scaler", None)
        if scaler is None or not 0 < scale < float("inf"):
            raise ValueError(
                f"the loss scale cannot be {scale!r}; it is above 0 and "
                "finite, and there is one with fp16 only"
            )
        scaler.scale = float(scale)

    cur_scale = loss_scale

    def needs_scaler(self) -> bool:
        """Whether `engine.scale(loss).backward()` is due, and not `loss.backward()`."""
        scaler = getattr(self.net.precision, "scaler", None)
        return isinstance(scaler, DynamicLossScale) or self.loss_scale != 1.0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip and update, without counting: `engine.step` calls this."""
        if closure is not None:
            raise ValueError(
                "a closure would need its own forward and backward; call "
                "engine.backward(loss), then engine.step()"
            )
        self.norm = None
        if self.clipping:
            self.norm = self.net.clip_grad_norm(self.clipping)
        elif self.with_norm:
            self.norm = self.net.grad_norm()
        self.overflow = not self.net.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, or make them zeros."""
        self.net.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here: the buffers have been made."""
        raise RuntimeError(
            "parameters are in flat buffers already, by groups; give all "
            "groups to minizero.initialize, and freeze by requires_grad "
            "before it"
        )

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns, in host memory; for looking at.

        Wherever states rest, they are here; a run is saved by
        `engine.save_checkpoint`.
        """
        found = super().state_dict()
        found["state"] = {
            index: {
                key: self.net.home.fetch(value)
                if isinstance(value, Tensor) and value.ndim
                else value
                for key, value in state.items()
            }
            for index, state in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not here: states are shards, which may rest elsewhere."""
        raise RuntimeError(
            "optimizer states are sharded; load them with "
            "engine.load_checkpoint(folder)"
        )
