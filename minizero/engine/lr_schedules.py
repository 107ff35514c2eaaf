"""DeepSpeed's five schedules of learning rates, as functions of the step.

The functions with small letters are the mathematics: of a step, and of nothing else.
Those with DeepSpeed's names check options and make a `Schedule` of them. Steps count
from 0; -1 stands for what the optimizer has before its first update. `Rates` are one
number, or a list with one for each parameter group.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

Rates = float | Sequence[float]


def warm_up(step: int, steps: int, kind: str) -> float:
    """How far a rise over `steps` has come, 0 to 1: in a line, or as log(step + 1)."""
    if not 0 <= step < steps:
        return float(step > 0)
    return step / steps if kind == "linear" else math.log(step + 1) / math.log(steps)


def line(step: int, begin: int, end: int) -> float:
    """A fall from 1 to 0 between two steps."""
    return max(0.0, (end - step) / max(1, end - begin))


def cosine(step: int, begin: int, end: int) -> float:
    """The same along half a cosine (Loshchilov and Hutter 2017), one step earlier."""
    gone = min(1.0, (step - begin + 1) / max(1, end - begin))
    return (1 + math.cos(math.pi * gone)) / 2


def cycle(step: int, up: int, down: int, stairs_up: int, stairs_down: int) -> float:
    """A rise from 0 to 1 in `up` steps and a fall in `down`; stairs, if not 0."""
    gone, length, stairs = step % (up + down), up, stairs_up
    if gone > up:
        gone, length, stairs = up + down - gone, down, stairs_down
    return math.floor(gone * stairs / length) / stairs if stairs > 0 else gone / length


class Schedule(LRScheduler):
    """Writes the rates of a step to an optimizer's groups, one step at a time.

    `name`: DeepSpeed's. `rates`, `betas`: of a step, a value for each group; `betas`
    may be None.
    `last_batch_iteration`: the step that was made last. Unless some were made, the
    first rates are written at once: the first update comes before the first `step`.
    """

    def __init__(
        self,
        name: str,
        optimizer: Optimizer,
        rates: Callable[[int], list[float]],
        last_batch_iteration: int,
        betas: Callable[[int], list[tuple[float, float]]] | None = None,
    ) -> None:
        # without torch's own, which wraps optimizer.step for a warning that a skipped
        # step would earn, and adds to the groups' options, which are saved
        self.name, self.optimizer = name, optimizer
        self.base_lrs = self._last_lr = [*_own(optimizer)]
        self._rates, self._betas = rates, betas
        if last_batch_iteration == -1:
            self.step(-1)
        self.last_batch_iteration = last_batch_iteration

    def get_lr(self) -> list[float | Tensor]:
        """The rate of each group after `last_batch_iteration`."""
        return [*self._rates(self.last_batch_iteration)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group, or None if they do not move."""
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
    optimizer: Any,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise from one learning rate to another, and stay there.

    `warmup_max_lr`: by default the rate that the group has. The first step repeats
    what the constructor writes.
    """
    moved, steps = _optimizer_in(optimizer), _warm(warmup_num_steps, warmup_type)
    top = _own(moved) if warmup_max_lr is None else warmup_max_lr
    low, high = _each(moved, warmup_min_lr=warmup_min_lr, warmup_max_lr=top)
    rates = _between(low, high, lambda step: warm_up(step, steps, warmup_type))
    return Schedule("WarmupLR", moved, rates, last_batch_iteration)


def WarmupDecayLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_lr: Rates = 0.0,
    warmup_max_lr: Rates = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise, and fall in a line: at step `total_num_steps` to the first rate.

    A rate of 0 at the end needs a `warmup_min_lr` of 0, the default.
    """
    moved = _optimizer_in(optimizer)
    steps = _warm(warmup_num_steps, warmup_type, total_num_steps)
    low, high = _each(moved, warmup_min_lr=warmup_min_lr, warmup_max_lr=warmup_max_lr)

    def height(step: int) -> float:
        if step < steps:
            return warm_up(step, steps, warmup_type)
        return line(step, steps, total_num_steps)

    return Schedule(
        "WarmupDecayLR", moved, _between(low, high, height), last_batch_iteration
    )


def WarmupCosineLR(
    optimizer: Any,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = "log",
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise to the group's learning rate, and fall in half a cosine.

    `warmup_min_ratio`, `cos_min_ratio`: first and last rate, over the group's own. The
    constructor writes 0; from the first step on `warmup_min_ratio` counts.
    """
    moved = _optimizer_in(optimizer)
    steps = _warm(warmup_num_steps, warmup_type, total_num_steps)
    own = _own(moved)

    def ratio(step: int) -> float:
        if step < 0:
            return 0.0
        low, height = warmup_min_ratio, warm_up(step, steps, warmup_type)
        if step >= steps:
            low, height = cos_min_ratio, cosine(step, steps, total_num_steps)
        return max(0.0, low + (1 - low) * height)

    return Schedule(
        "WarmupCosineLR",
        moved,
        lambda step: [rate * ratio(step) for rate in own],
        last_batch_iteration,
    )


def OneCycle(
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
) -> Schedule:
    """Rise and fall between two learning rates, then decay (Smith 2018).

    After the cycle the rate is min / (1 + `decay_lr_rate` * i), where i is the number
    of intervals of `decay_step_size` steps since; a size of 0 is no decay.
    `cycle_momentum` moves the first beta of an Adam the other way, from
    `cycle_max_mom` down and up again, then grows it by `decay_mom_rate`, and sets the
    second to 0.99. It does nothing, and says so, where there are no betas.
    """
    moved = _optimizer_in(optimizer)
    up, down = cycle_first_step_size, cycle_second_step_size
    down = up if down is None else down
    if up <= 0 or down < 0:
        raise ValueError(
            "cycle_first_step_size must be above 0 and cycle_second_step_size at "
            f"least 0, not {up!r} and {down!r}"
        )
    first, second = cycle_first_stair_count, cycle_second_stair_count
    stairs = first, first if second is None else second
    low, high = _each(moved, cycle_min_lr=cycle_min_lr, cycle_max_lr=cycle_max_lr)
    least, most = _each(moved, cycle_min_mom=cycle_min_mom, cycle_max_mom=cycle_max_mom)

    def height(step: int) -> float:
        return cycle(step + 1, up, down, *stairs)

    def decay(step: int, rate: float) -> float:
        since = step + 1 - (up + down)
        return 1 + rate * since / decay_step_size if decay_step_size else 1.0

    def rates(step: int) -> list[float]:
        if step < up + down:
            return _between(low, high, height)(step)
        return [rate / decay(step, decay_lr_rate) for rate in low]

    def betas(step: int) -> list[tuple[float, float]]:
        # before the first step the lowest beta; the cycle starts at the highest
        moving = least if step < 0 else _between(most, least, height)(step)
        if step >= up + down:
            moving = [beta * decay(step, decay_mom_rate) for beta in most]
        return [(beta, 0.99) for beta in moving]

    if cycle_momentum and "betas" not in moved.defaults:
        cycle_momentum = False
        warnings.warn(
            f"cycle_momentum does nothing, since {type(moved).__name__} has no betas; "
            "set it to false",
            stacklevel=2,
        )
    beta_of = betas if cycle_momentum else None
    return Schedule("OneCycle", moved, rates, last_batch_iteration, beta_of)


def LRRangeTest(
    optimizer: Any,
    lr_range_test_min_lr: Rates = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
    last_batch_iteration: int = -1,
) -> Schedule:
    """Rise without end, to see at which learning rate training breaks (Smith 2018).

    The rate is min * (1 + `lr_range_test_step_rate` * i), where i is the number of
    intervals of `lr_range_test_step_size` steps; whole ones with a staircase.
    """
    moved, size = _optimizer_in(optimizer), lr_range_test_step_size
    (low,) = _each(moved, lr_range_test_min_lr=lr_range_test_min_lr)
    _check_steps("lr_range_test_step_size", size)

    def rates(step: int) -> list[float]:
        gone = (step + 1) // size if lr_range_test_staircase else (step + 1) / size
        return [rate * (1 + lr_range_test_step_rate * gone) for rate in low]

    return Schedule("LRRangeTest", moved, rates, last_batch_iteration)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "WarmupLR": WarmupLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupCosineLR": WarmupCosineLR,
    "OneCycle": OneCycle,
    "LRRangeTest": LRRangeTest,
}


def _optimizer_in(optimizer: Any) -> Optimizer:
    """An optimizer of torch, or the one that a wrapper holds."""
    for found in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(found, Optimizer):
            return found
    raise TypeError(
        "a schedule moves the groups of a torch.optim.Optimizer, not of a "
        f"{type(optimizer).__name__}"
    )


def _own(optimizer: Optimizer) -> list[float]:
    """The rate of each group; a number also of a tensor, which will change."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def _each(optimizer: Optimizer, **options: Rates) -> Iterator[list[float]]:
    """For each option a number for each group: its value, or those that it lists."""
    groups = len(optimizer.param_groups)
    for name, value in options.items():
        values = value if isinstance(value, Sequence) else [value] * groups
        if len(values) != groups:
            raise ValueError(
                f"{name} lists {len(values)} values, and the optimizer has {groups} "
                "groups; give one value, or one for each group"
            )
        yield [float(v) for v in values]


def _between(
    low: list[float], high: list[float], height: Callable[[int], float]
) -> Callable[[int], list[float]]:
    """Of a step: each group's value at a height between two."""
    return lambda step: [
        a + (b - a) * height(step) for a, b in zip(low, high, strict=True)
    ]


def _check_steps(name: str, steps: int) -> None:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(
            f"{name} must be a whole number of steps, at least 1, not {steps!r}"
        )


def _warm(steps: int, kind: str, total: int | None = None) -> int:
    """The length of a warm-up, of at least 2: the logarithm of 1 is no length."""
    _check_steps("warmup_num_steps", steps)
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type must be 'log' or 'linear', not {kind!r}")
    if total is not None and total < max(2, steps):
        warnings.warn(
            f"the schedule ends after {total} steps (total_num_steps), within its "
            f"warm-up of {max(2, steps)} (warmup_num_steps)",
            stacklevel=3,
        )
    return max(2, steps)
