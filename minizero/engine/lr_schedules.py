"""DeepSpeed's five learning-rate schedules, as functions of the step.

The functions with small letters are the shapes. Those with DeepSpeed's names make a
`Schedule` of them. Steps count from 0; step -1 gives the rate before the first `step()`.
`Rates` are one number, or a list with one for each parameter group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]
OfStep = Callable[[int], list[Any]]


def warm_up(step: int, steps: int, kind: str) -> float:
    """A rise from 0 to 1 over `steps`: "linear", or "log" as log(step + 1)."""
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


class Schedule(LRScheduler):
    """Writes the rates of a step to the groups of an optimizer.

    `name`: DeepSpeed's. `rates`, `betas`: of a step, a value for each group.
    `last_batch_iteration`: the last step. If it is -1, the rates of step -1 are written
    at once, for the first update.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        rates: OfStep,
        last_batch_iteration: int,
        betas: OfStep | None = None,
    ) -> None:
        # not `super().__init__`: it wraps optimizer.step, to warn of steps that an
        # overflow skips, and writes options to the groups, which are saved
        self.name, self.optimizer = name, optimizer
        self.base_lrs = self._last_lr = _lr(optimizer)
        self._rates, self._betas = rates, betas
        if last_batch_iteration == -1:
            self.step(-1)
        self.last_batch_iteration = last_batch_iteration

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group after `last_batch_iteration`."""
        return self._rates(self.last_batch_iteration)

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group; None if the schedule leaves them."""
        return self._betas(self.last_batch_iteration) if self._betas else None

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to a given one."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
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


def WarmupLR(
    optimizer: Optimizer,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise to `warmup_max_lr`, by default the group's own rate, and stay there."""
    top = _lr(optimizer) if warmup_max_lr is None else warmup_max_lr
    height = _warm_up_then(warmup_num_steps, warmup_type, lambda step: 1.0)
    rates = _between(optimizer, warmup_min_lr, top, height)
    return Schedule("WarmupLR", optimizer, rates, last_batch_iteration)


def WarmupDecayLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise, then fall in a line to `warmup_min_lr` at step `total_num_steps`."""
    begin = max(2, warmup_num_steps)
    height = _warm_up_then(begin, warmup_type, lambda s: line(s, begin, total_num_steps))
    rates = _between(optimizer, warmup_min_lr, warmup_max_lr, height)
    return Schedule("WarmupDecayLR", optimizer, rates, last_batch_iteration)


def WarmupCosineLR(
    optimizer: Optimizer,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise to the group's own rate, then fall along half a cosine.

    `warmup_min_ratio`, `cos_min_ratio`: first and last rate, over the group's own. Step
    -1 has rate 0 all the same.
    """
    begin, own = max(2, warmup_num_steps), _lr(optimizer)
    height = _warm_up_then(
        begin, warmup_type, lambda step: cosine(step, begin, total_num_steps)
    )

    def rates(step: int) -> list[float]:
        low = warmup_min_ratio if step < begin else cos_min_ratio
        ratio = max(0.0, low + (1 - low) * height(step)) if step >= 0 else 0.0
        return [rate * ratio for rate in own]

    return Schedule("WarmupCosineLR", optimizer, rates, last_batch_iteration)


def OneCycle(
    optimizer: Optimizer,
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
) -> Schedule:
    """Rise and fall between two rates, then decay (Smith 2018).

    After the cycle the rate is min / (1 + `decay_lr_rate` * i), where i is the number of
    intervals of `decay_step_size` steps since; a size of 0 is no decay. `cycle_momentum`
    moves Adam's first beta the other way, from `cycle_max_mom` down and up again, then
    grows it by `decay_mom_rate`, and sets the second to 0.99.
    """
    up, down = cycle_first_step_size, cycle_second_step_size
    down = up if down is None else down
    stairs = cycle_first_stair_count, cycle_second_stair_count
    stairs_down = stairs[0] if stairs[1] is None else stairs[1]

    def height(step: int) -> float:
        return cycle(step + 1, up, down, stairs[0], stairs_down)

    def decay(step: int, rate: float) -> float:
        since = step + 1 - (up + down)
        return 1 + rate * since / decay_step_size if decay_step_size else 1.0

    in_cycle = _between(optimizer, cycle_min_lr, cycle_max_lr, height)
    lowest = _each(optimizer, cycle_min_lr)
    least, most = _each(optimizer, cycle_min_mom), _each(optimizer, cycle_max_mom)
    beta_in_cycle = _between(optimizer, cycle_max_mom, cycle_min_mom, height)

    def rates(step: int) -> list[float]:
        if step < up + down:
            return in_cycle(step)
        return [rate / decay(step, decay_lr_rate) for rate in lowest]

    def betas(step: int) -> list[tuple[float, float]]:
        # before the first step the lowest beta; the cycle starts at the highest
        first = least if step < 0 else beta_in_cycle(step)
        if step >= up + down:
            first = [beta * decay(step, decay_mom_rate) for beta in most]
        return [(beta, 0.99) for beta in first]

    moves_betas = cycle_momentum and "betas" in optimizer.defaults
    if cycle_momentum and not moves_betas:
        warnings.warn(
            f"cycle_momentum has no effect: {type(optimizer).__name__} has no betas",
            stacklevel=2,
        )
    own = betas if moves_betas else None
    return Schedule("OneCycle", optimizer, rates, last_batch_iteration, own)


def LRRangeTest(
    optimizer: Optimizer,
    lr_range_test_min_lr: Rates = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise without end, to find the rate at which training breaks (Smith 2018).

    The rate is min * (1 + `lr_range_test_step_rate` * i), where i is the number of
    intervals of `lr_range_test_step_size` steps; whole ones with a staircase.
    """
    low, size = _each(optimizer, lr_range_test_min_lr), lr_range_test_step_size

    def rates(step: int) -> list[float]:
        done = (step + 1) // size if lr_range_test_staircase else (step + 1) / size
        return [rate * (1 + lr_range_test_step_rate * done) for rate in low]

    return Schedule("LRRangeTest", optimizer, rates, last_batch_iteration)


_KINDS = (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
SCHEDULES: dict[str, Callable[..., Schedule]] = {kind.__name__: kind for kind in _KINDS}


def _lr(optimizer: Optimizer) -> list[float]:
    """The rate of each group now."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def _each(optimizer: Optimizer, value: Rates) -> list[float]:
    """One value for each group."""
    groups = len(optimizer.param_groups)
    values = list(value) if isinstance(value, Sequence) else [value] * groups
    if len(values) != groups:
        raise ValueError(f"{value} has not one value for each of {groups} groups")
    return [float(v) for v in values]


def _between(
    optimizer: Optimizer, low: Rates, high: Rates, height: Callable[[int], float]
) -> OfStep:
    """Of a step: each group's value, at a height of 0 to 1 between two."""
    pairs = [*zip(_each(optimizer, low), _each(optimizer, high), strict=True)]
    return lambda step: [a + (b - a) * height(step) for a, b in pairs]


def _warm_up_then(
    steps: int, kind: str, later: Callable[[int], float]
) -> Callable[[int], float]:
    """A warm-up of at least two steps, and what comes later."""
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {kind!r}")
    steps = max(2, steps)  # the logarithm of 1 is 0
    return lambda step: warm_up(step, steps, kind) if step < steps else later(step)
