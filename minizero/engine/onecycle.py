"""A rate that rises and falls once, and betas that do the reverse."""

from __future__ import annotations

import math
import warnings
from typing import Any

from .rates import LearningRates, Rates, each_group


class _Cycle:
    """The shape of a cycle: up in `first` steps, down in `second`.

    With stairs, that many even ones instead of a line.
    """

    def __init__(
        self,
        first: int,
        second: int | None,
        first_stairs: int,
        second_stairs: int | None,
    ) -> None:
        self.first = first
        self.second = first if second is None else second
        if self.first <= 0 or self.second < 0:
            raise ValueError(
                "cycle_first_step_size must be above 0 and "
                "cycle_second_step_size at least 0, not "
                f"{first!r} and {self.second!r}"
            )
        self.first_stairs = first_stairs
        self.second_stairs = first_stairs if second_stairs is None else second_stairs
        self.total = self.first + self.second

    def height(self, step: int) -> float:
        """0 at the start and the end, 1 at the top."""
        gone = step % self.total
        length, stairs = self.first, self.first_stairs
        if gone > self.first:
            gone, length = self.total - gone, self.second
            stairs = self.second_stairs
        if stairs > 0:
            return math.floor(gone * stairs / length) / stairs
        return gone / length


class OneCycle(LearningRates):
    """Rise and fall between two learning rates, then decay (Smith 2018).

    `cycle_min_lr`, `cycle_max_lr`: one value, or one for each group.
    After the cycle the rate is min / (1 + `decay_lr_rate` * i), where i is
    the number of intervals of `decay_step_size` steps since; a size of 0 is
    no decay.
    `cycle_momentum` moves the first beta of an Adam the other way, from
    `cycle_max_mom` down and up again, then grows it by `decay_mom_rate`, and
    sets the second beta to 0.99. It does nothing, and says so, for an
    optimizer that has no betas.
    """

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.cycle = _Cycle(
            cycle_first_step_size,
            cycle_second_step_size,
            cycle_first_stair_count,
            cycle_second_stair_count,
        )
        own = self.optimizer
        self.min_lrs = each_group(own, "cycle_min_lr", cycle_min_lr)
        self.max_lrs = each_group(own, "cycle_max_lr", cycle_max_lr)
        self.min_moms = each_group(own, "cycle_min_mom", cycle_min_mom)
        self.max_moms = each_group(own, "cycle_max_mom", cycle_max_mom)
        self.decay_step_size = decay_step_size
        self.decay_lr_rate = decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.cycle_momentum = cycle_momentum and self._has_betas()
        if last_batch_iteration == -1:
            self._write()

    def _has_betas(self) -> bool:
        if "betas" in self.optimizer.defaults:
            return True
        warnings.warn(
            "cycle_momentum does nothing, since "
            f"{type(self.optimizer).__name__} has no betas; set it to false",
            stacklevel=3,
        )
        return False

    def _write(self) -> None:
        super()._write()
        for group, betas in zip(
            self._groups, self.get_mom() or [], strict=self.cycle_momentum
        ):
            group["betas"] = betas

    def _decay(self, rate: float) -> float:
        """How much a rate decays in the steps since the cycle."""
        if not self.decay_step_size:
            return 1.0
        since = self.last_batch_iteration - self.cycle.total + 1
        return 1 + rate * since / self.decay_step_size

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration >= self.cycle.total:
            decay = self._decay(self.decay_lr_rate)
            return [low / decay for low in self.min_lrs]
        height = self.cycle.height(self.last_batch_iteration + 1)
        pairs = zip(self.min_lrs, self.max_lrs, strict=True)
        return [low + (high - low) * height for low, high in pairs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, or None if they do not move."""
        if not self.cycle_momentum:
            return None
        step = self.last_batch_iteration
        if step >= self.cycle.total:
            growth = self._decay(self.decay_mom_rate)
            return [(high * growth, 0.99) for high in self.max_moms]
        # the constructor writes the lowest, and the cycle starts highest
        height = 1.0 if step < 0 else self.cycle.height(step + 1)
        pairs = zip(self.min_moms, self.max_moms, strict=True)
        return [(high - (high - low) * height, 0.99) for low, high in pairs]
