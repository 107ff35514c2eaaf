"""Learning rates that warm up, fall or cycle: DeepSpeed's, step by step."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .onecycle import OneCycle
from .rates import LearningRates, Rates, each_group


class _Warmup(LearningRates):
    """Rises over `warmup_num_steps`, then does what a subclass says.

    `warmup_type`: "linear", or "log" for the logarithm of the step.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_num_steps: int,
        warmup_type: str,
        last_batch_iteration: int,
    ) -> None:
        whole = isinstance(warmup_num_steps, int)
        if not whole or warmup_num_steps < 1:
            raise ValueError(
                "warmup_num_steps must be a whole number of steps, at least "
                f"1, not {warmup_num_steps!r}"
            )
        if warmup_type not in ("log", "linear"):
            raise ValueError(
                f"warmup_type must be 'log' or 'linear', not {warmup_type!r}"
            )
        super().__init__(optimizer, last_batch_iteration)
        # the logarithm of one step is no length
        self.warmup_num_steps = max(2, warmup_num_steps)
        self.warmup_type = warmup_type

    def _warm(self, step: int) -> float:
        """How far the rise has come at a step of it, 0 to 1."""
        if self.warmup_type == "linear":
            return step / self.warmup_num_steps
        return math.log(step + 1) / math.log(self.warmup_num_steps)

    def _check_total(self, total_num_steps: int) -> int:
        if total_num_steps < self.warmup_num_steps:
            warnings.warn(
                f"the schedule ends after {total_num_steps} steps "
                "(total_num_steps), within its warm-up of "
                f"{self.warmup_num_steps} (warmup_num_steps)",
                stacklevel=3,
            )
        return total_num_steps


class WarmupLR(_Warmup):
    """Rise from one learning rate to another, and stay there.

    `warmup_min_lr`, `warmup_max_lr`: one value, or one for each group; the
    second is by default the rate that the group has.
    The rate of step s of w: min + (max - min) * s / w, or * log(s+1)/log(w).
    The first step repeats what the constructor writes.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = self.first_lrs
        self.min_lrs = each_group(self.optimizer, "warmup_min_lr", warmup_min_lr)
        self.max_lrs = each_group(self.optimizer, "warmup_max_lr", warmup_max_lr)
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        step = max(self.last_batch_iteration, 0)
        warm = step < self.warmup_num_steps
        height = self._warm(step) if warm else self._after(step)
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * height for low, high in pairs]

    def _after(self, step: int) -> float:
        """Between the two rates, once the rise is over."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Rise, and fall in a line: at step `total_num_steps` to the first rate.

    A rate of 0 at the end needs a `warmup_min_lr` of 0, the default.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_batch_iteration,
        )
        self._check_total(total_num_steps)

    def _after(self, step: int) -> float:
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        return max(0.0, (self.total_num_steps - step) / length)


class WarmupCosineLR(_Warmup):
    """Rise to the group's learning rate, and fall in half a cosine.

    `warmup_min_ratio`, `cos_min_ratio`: first and last rate, over the
    group's own. The constructor writes 0; from the first step on
    `warmup_min_ratio` counts.
    """

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, warmup_num_steps, warmup_type, last_batch_iteration)
        self.total_num_steps = self._check_total(total_num_steps)
        self.warmup_min_ratio = warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        if last_batch_iteration == -1:
            self._write()

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [rate * ratio for rate in self.first_lrs]

    def get_lr_ratio(self) -> float:
        """What the groups' own rates are multiplied with."""
        step = self.last_batch_iteration
        if step < 0:
            return 0.0
        if step < self.warmup_num_steps:
            low = self.warmup_min_ratio
            return low + (1 - low) * self._warm(step)
        length = max(1, self.total_num_steps - self.warmup_num_steps)
        gone = min(1.0, (step - self.warmup_num_steps + 1) / length)
        height = (1 + math.cos(math.pi * gone)) / 2
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * height)


SCHEDULES: dict[str, type[LearningRates]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
}
