"""What the schedules of learning rates have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Rates = float | Sequence[float]


def _optimizer_in(optimizer: Any) -> Optimizer:
    """An optimizer of torch, or the one that a wrapper holds."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, Optimizer):
            return found
    raise TypeError(
        "a schedule moves the groups of a torch.optim.Optimizer, not of a "
        f"{type(optimizer).__name__}"
    )


def each_group(optimizer: Optimizer, name: str, value: Rates) -> list[float]:
    """One number for each group: `value`, or the numbers that it lists."""
    groups = len(optimizer.param_groups)
    if not isinstance(value, Sequence):
        return [float(value)] * groups
    if len(value) != groups:
        raise ValueError(
            f"{name} lists {len(value)} values, and the optimizer has "
            f"{groups} groups; give one value, or one for each group"
        )
    return [float(v) for v in value]


class LearningRates:
    """Moves the learning rate of every group, one step at a time.

    `last_batch_iteration`: the step that was made last, from 0; -1 is none.
    Unless some were made, the first rates are written to the optimizer at
    once: the first update comes before the first `step`.
    """

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = _optimizer_in(optimizer)
        self.last_batch_iteration = last_batch_iteration
        # a fused optimizer may keep its rate in a tensor, which will change
        self.first_lrs = [float(g["lr"]) for g in self._groups]
        self._last_lr = self.first_lrs

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def get_lr(self) -> list[float]:
        """The rate of each group after `last_batch_iteration`."""
        raise NotImplementedError

    def get_last_lr(self) -> list[float]:
        """The rates that were written last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to a given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write()

    def _write(self) -> None:
        self._last_lr = self.get_lr()
        for group, rate in zip(self._groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, int]:
        """The step; options are not part of it."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved step, and write its rates."""
        self.step(state["last_batch_iteration"])
