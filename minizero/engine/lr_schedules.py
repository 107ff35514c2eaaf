"""DeepSpeed's five learning-rate schedules, with its names and options.

A schedule says which rate a parameter group has at a step. Steps count from 0; step -1
gives the rate before the first `step()`. An option of type `Rates` is one number, or a
list with one for each group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]


@dataclass(eq=False)
class LRSchedule(LRScheduler):
    """Writes the rates of a step to the groups of an optimizer.

    The rates of step -1 are written at once, for the first update.
    `initial_rates`: what the groups had before. `last_batch_iteration`: the last step.
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        # not `LRScheduler.__init__`: it wraps optimizer.step, to warn of steps that an
        # overflow skips, and writes options to the groups, which are saved
        self.initial_rates = [float(g["lr"]) for g in self.optimizer.param_groups]
        self.base_lrs: list[float | Tensor] = [*self.initial_rates]  # torch's name
        self.step(-1)

    def rate(self, step: int, group: int) -> float:
        """The rate of a group at a step."""
        raise NotImplementedError

    def for_group(self, group: int, value: Rates) -> float:
        """An option's value for a group."""
        groups = len(self.initial_rates)
        values = value if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise ValueError(f"{value} has not one value for each of {groups} groups")
        return float(values[group])

    def between(self, group: int, low: Rates, high: Rates, height: float) -> float:
        """A value between two options of a group: `low` at height 0, `high` at 1."""
        bottom, top = self.for_group(group, low), self.for_group(group, high)
        return bottom + (top - bottom) * height

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to a given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration: int = last_batch_iteration
        self.last_epoch = last_batch_iteration + 1  # torch's count
        groups = self.optimizer.param_groups
        self._last_lr = [self.rate(last_batch_iteration, i) for i in range(len(groups))]
        for group, rate in zip(groups, self._last_lr, strict=True):
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


def warm_up(step: int, steps: int, kind: str) -> float:
    """A rise from 0 to 1 over `steps`: "linear", or "log" as log(step + 1)."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {kind!r}")
    if not 0 <= step < steps:
        return float(step > 0)
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


@dataclass(eq=False)
class WarmupLR(LRSchedule):
    """Rise to `warmup_max_lr`, by default the group's own rate, and stay there."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def rate(self, step: int, group: int) -> float:
        top = self.initial_rates if self.warmup_max_lr is None else self.warmup_max_lr
        height = warm_up(step, max(2, self.warmup_num_steps), self.warmup_type)
        return self.between(group, self.warmup_min_lr, top, height)


@dataclass(eq=False)
class WarmupDecayLR(LRSchedule):
    """Rise, then fall in a line to `warmup_min_lr` at step `total_num_steps`."""

    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"

    def rate(self, step: int, group: int) -> float:
        begin, end = max(2, self.warmup_num_steps), self.total_num_steps
        height = warm_up(step, begin, self.warmup_type)
        if step >= begin:
            height = max(0.0, (end - step) / max(1, end - begin))
        return self.between(group, self.warmup_min_lr, self.warmup_max_lr, height)


@dataclass(eq=False)
class WarmupCosineLR(LRSchedule):
    """Rise to the group's own rate, then fall along half a cosine.

    `warmup_min_ratio`, `cos_min_ratio`: first and last rate, over the group's own. Step
    -1 has rate 0 all the same.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"

    def rate(self, step: int, group: int) -> float:
        if step < 0:
            return 0.0
        begin, low = max(2, self.warmup_num_steps), self.warmup_min_ratio
        height = warm_up(step, begin, self.warmup_type)
        if step >= begin:  # the cosine is one step ahead (Loshchilov and Hutter 2017)
            low, falls = self.cos_min_ratio, max(1, self.total_num_steps - begin)
            height = (1 + math.cos(math.pi * min(1.0, (step - begin + 1) / falls))) / 2
        return self.initial_rates[group] * max(0.0, low + (1 - low) * height)


@dataclass(eq=False)
class OneCycle(LRSchedule):
    """Rise and fall between two rates, then decay (Smith 2018).

    After the cycle the rate is min / (1 + `decay_lr_rate` * i), where i is the number
    of intervals of `decay_step_size` steps since; a size of 0 is no decay.
    `cycle_momentum` moves Adam's first beta the other way, from `cycle_max_mom` down and
    up again, then grows it by `decay_mom_rate`, and sets the second to 0.99. A group
    without betas has no use for it.
    """

    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0

    def height(self, step: int) -> tuple[float, float]:
        """A step's height in the cycle, 0 to 1, and intervals of decay since its end."""
        up, down = self.cycle_first_step_size, self.cycle_second_step_size
        cycle = up + (up if down is None else down)
        if step >= cycle:
            size = self.decay_step_size
            return 0.0, (step + 1 - cycle) / size if size else 0.0
        done, length = (step + 1) % cycle, up
        if done > up:
            done, length = cycle - done, cycle - up
        return done / length, 0.0

    def rate(self, step: int, group: int) -> float:
        height, since = self.height(step)
        rate = self.between(group, self.cycle_min_lr, self.cycle_max_lr, height)
        return rate / (1 + self.decay_lr_rate * since)

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        # before the first step the lowest beta; the cycle starts at the highest
        at = self.last_batch_iteration
        height, since = self.height(at) if at >= 0 else (1.0, 0.0)
        for i, group in enumerate(self.optimizer.param_groups):
            if self.cycle_momentum and "betas" in group:
                beta = self.between(i, self.cycle_max_mom, self.cycle_min_mom, height)
                group["betas"] = (beta * (1 + self.decay_mom_rate * since), 0.99)


@dataclass(eq=False)
class LRRangeTest(LRSchedule):
    """Rise without end, to find the rate at which training breaks (Smith 2018).

    The rate is min * (1 + `lr_range_test_step_rate` * i), where i is the number of
    intervals of `lr_range_test_step_size` steps; whole ones with a staircase.
    """

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def rate(self, step: int, group: int) -> float:
        done = (step + 1) / self.lr_range_test_step_size
        done = math.floor(done) if self.lr_range_test_staircase else done
        factor = 1 + self.lr_range_test_step_rate * done
        return self.for_group(group, self.lr_range_test_min_lr) * factor


_KINDS = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
SCHEDULES: dict[str, type[LRSchedule]] = {kind.__name__: kind for kind in _KINDS}
