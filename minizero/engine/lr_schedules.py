"""DeepSpeed's five learning-rate schedules, as functions of the step.

The functions are the shapes, the classes have DeepSpeed's names and options. Steps count
from 0; step -1 gives the rates before the first `step()`. `Rates` are one number, or a
list with one for each parameter group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]


def warm_up(step: int, steps: int, kind: str) -> float:
    """A rise from 0 to 1 over `steps`: "linear", or "log" as log(step + 1)."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {kind!r}")
    if not 0 <= step < steps:
        return float(step > 0)
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


def line(step: int, begin: int, end: int) -> float:
    """A fall from 1 to 0 between two steps."""
    return max(0.0, (end - step) / max(1, end - begin))


def cosine(step: int, begin: int, end: int) -> float:
    """The same along half a cosine (Loshchilov and Hutter 2017), one step earlier."""
    done = min(1.0, (step - begin + 1) / max(1, end - begin))
    return (1 + math.cos(math.pi * done)) / 2


def cycle(step: int, up: int, down: int, stairs_up: int, stairs_down: int) -> float:
    """A rise from 0 to 1 in `up` steps and a fall in `down`; in stairs, if not 0."""
    done, length, stairs = step % (up + down), up, stairs_up
    if done > up:
        done, length, stairs = up + down - done, down, stairs_down
    return math.floor(done * stairs / length) / stairs if stairs else done / length


@dataclass(eq=False)
class Schedule(LRScheduler):
    """Writes the rates of a step to the groups of an optimizer.

    `own`: the groups' own rates at the start. `last_batch_iteration`, the last field
    of each schedule: the last step. If it is -1, the rates of step -1 are written at
    once, for the first update.
    """

    optimizer: Optimizer

    def __post_init__(self) -> None:
        # not `LRScheduler.__init__`: it wraps optimizer.step, to warn of steps that an
        # overflow skips, and writes options to the groups, which are saved
        self.own = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.base_lrs: list[float | Tensor] = [*self.own]  # torch's name
        self._last_lr = self.base_lrs
        if self.last_batch_iteration == -1:
            self.step(-1)

    def rates(self, step: int) -> list[float]:
        """The rate of each group at a step."""
        raise NotImplementedError

    def betas(self, step: int) -> list[tuple[float, float]] | None:
        """The betas of each group at a step; None leaves them."""
        return None

    def each(self, value: Rates) -> list[float]:
        """One value for each group."""
        groups = len(self.own)
        values = list(value) if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise ValueError(f"{value} has not one value for each of {groups} groups")
        return [float(v) for v in values]

    def between(self, low: Rates, high: Rates, height: float) -> list[float]:
        """Each group's value at a height, 0 to 1, between two."""
        pairs = zip(self.each(low), self.each(high), strict=True)
        return [a + (b - a) * height for a, b in pairs]

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group after the last step."""
        return [*self.rates(self.last_batch_iteration)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group after the last step; None if they do not move."""
        return self.betas(self.last_batch_iteration)

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to a given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration: int = last_batch_iteration
        self.last_epoch = last_batch_iteration + 1  # torch's count
        groups = self.optimizer.param_groups
        self._last_lr = self.get_lr()
        for group, rate in zip(groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for group, betas in zip(groups, self.get_mom() or (), strict=False):
            group["betas"] = betas

    def state_dict(self) -> dict[str, int]:
        """The step; options are not part of it."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved step, and write its rates."""
        self.step(state["last_batch_iteration"])


@dataclass(eq=False)
class WarmupLR(Schedule):
    """Rise to `warmup_max_lr`, by default the group's own rate, and stay there."""

    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates | None = None
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def rates(self, step: int) -> list[float]:
        top = self.own if self.warmup_max_lr is None else self.warmup_max_lr
        height = warm_up(step, max(2, self.warmup_num_steps), self.warmup_type)
        return self.between(self.warmup_min_lr, top, height)


@dataclass(eq=False)
class WarmupDecayLR(Schedule):
    """Rise, then fall in a line to `warmup_min_lr` at step `total_num_steps`."""

    total_num_steps: int
    warmup_min_lr: Rates = 0.0
    warmup_max_lr: Rates = 0.001
    warmup_num_steps: int = 1000
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def rates(self, step: int) -> list[float]:
        begin = max(2, self.warmup_num_steps)
        height = warm_up(step, begin, self.warmup_type)
        if step >= begin:
            height = line(step, begin, self.total_num_steps)
        return self.between(self.warmup_min_lr, self.warmup_max_lr, height)


@dataclass(eq=False)
class WarmupCosineLR(Schedule):
    """Rise to the group's own rate, then fall along half a cosine.

    `warmup_min_ratio`, `cos_min_ratio`: first and last rate, over the group's own. Step
    -1 has rate 0 all the same.
    """

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: str = "log"
    last_batch_iteration: int = -1

    def rates(self, step: int) -> list[float]:
        if step < 0:
            return self.each(0.0)
        begin, low = max(2, self.warmup_num_steps), self.warmup_min_ratio
        height = warm_up(step, begin, self.warmup_type)
        if step >= begin:
            low, height = self.cos_min_ratio, cosine(step, begin, self.total_num_steps)
        return [rate * max(0.0, low + (1 - low) * height) for rate in self.own]


@dataclass(eq=False)
class OneCycle(Schedule):
    """Rise and fall between two rates, then decay (Smith 2018).

    After the cycle the rate is min / (1 + `decay_lr_rate` * i), where i is the number of
    intervals of `decay_step_size` steps since; a size of 0 is no decay. `cycle_momentum`
    moves Adam's first beta the other way, from `cycle_max_mom` down and up again, then
    grows it by `decay_mom_rate`, and sets the second to 0.99.
    """

    cycle_min_lr: Rates
    cycle_max_lr: Rates
    decay_lr_rate: float = 0.0
    cycle_first_step_size: int = 2000
    cycle_second_step_size: int | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: int = 0
    cycle_momentum: bool = True
    cycle_min_mom: Rates = 0.8
    cycle_max_mom: Rates = 0.9
    decay_mom_rate: float = 0.0
    last_batch_iteration: int = -1

    def __post_init__(self) -> None:
        if self.cycle_second_step_size is None:
            self.cycle_second_step_size = self.cycle_first_step_size
        if self.cycle_second_stair_count is None:
            self.cycle_second_stair_count = self.cycle_first_stair_count
        self._length = self.cycle_first_step_size + self.cycle_second_step_size
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            self.cycle_momentum = False
            name = type(self.optimizer).__name__
            warnings.warn(f"cycle_momentum has no effect: {name} has no betas", stacklevel=3)
        super().__post_init__()

    def _height(self, step: int) -> float:
        up, stairs = self.cycle_first_step_size, self.cycle_first_stair_count
        stairs_down = self.cycle_second_stair_count or 0
        return cycle(step + 1, up, self._length - up, stairs, stairs_down)

    def _decay(self, step: int, rate: float) -> float:
        size = self.decay_step_size
        return 1 + rate * (step + 1 - self._length) / size if size else 1.0

    def rates(self, step: int) -> list[float]:
        if step < self._length:
            return self.between(self.cycle_min_lr, self.cycle_max_lr, self._height(step))
        decay = self._decay(step, self.decay_lr_rate)
        return [rate / decay for rate in self.each(self.cycle_min_lr)]

    def betas(self, step: int) -> list[tuple[float, float]] | None:
        if not self.cycle_momentum:
            return None
        # before the first step the lowest beta; the cycle starts at the highest
        height = 1.0 if step < 0 else self._height(step)
        first = self.between(self.cycle_max_mom, self.cycle_min_mom, height)
        if step >= self._length:
            decay = self._decay(step, self.decay_mom_rate)
            first = [beta * decay for beta in self.each(self.cycle_max_mom)]
        return [(beta, 0.99) for beta in first]


@dataclass(eq=False)
class LRRangeTest(Schedule):
    """Rise without end, to find the rate at which training breaks (Smith 2018).

    The rate is min * (1 + `lr_range_test_step_rate` * i), where i is the number of
    intervals of `lr_range_test_step_size` steps; whole ones with a staircase.
    """

    lr_range_test_min_lr: Rates = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False
    last_batch_iteration: int = -1

    def rates(self, step: int) -> list[float]:
        done = (step + 1) / self.lr_range_test_step_size
        done = math.floor(done) if self.lr_range_test_staircase else done
        factor = 1 + self.lr_range_test_step_rate * done
        return [rate * factor for rate in self.each(self.lr_range_test_min_lr)]


_KINDS = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
SCHEDULES: dict[str, type[Schedule]] = {kind.__name__: kind for kind in _KINDS}
