"""Keys that contradict each other, and keys that have no effect together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from minizero.config.scheduler import (
    OneCycleParams,
    WarmupCosineParams,
    WarmupDecayParams,
)

from .optimizer import AdamParams
from .schema import Entry, changed, torch_name

if TYPE_CHECKING:
    from minizero.config.top import Config


def shown(value: Any) -> str:
    """A value as JSON writes it, if it is short."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def errors(config: Config) -> Iterator[str]:
    """A sentence for each contradiction."""
    yield from _path_errors(config)
    fp16 = config.fp16
    first = 2**fp16.initial_scale_power
    if fp16.enabled and not fp16.loss_scale and fp16.min_loss_scale > first:
        yield (
            f"fp16.min_loss_scale = {fp16.min_loss_scale} is above the first "
            f"scale, 2 ** initial_scale_power = {first}; lower it"
        )
    if fp16.enabled and config.bf16.enabled:
        yield "fp16 and bf16 are both enabled; disable one of them"
    else:
        yield from _dtype_errors(config)


def _path_errors(config: Config) -> Iterator[str]:
    paths = {}
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(config.zero_optimization, name)
        if block.device == "nvme" and not block.nvme_path:
            yield (
                f'zero_optimization.{name}.device is "nvme", but there is '
                "no nvme_path beside it; give the folder to put files in"
            )
        elif block.device == "nvme":
            paths[name] = shown(block.nvme_path)
    if len(set(paths.values())) > 1:
        given = " and ".join(paths.values())
        yield (
            f"zero_optimization has the nvme_path {given} in "
            f"{' and '.join(paths)}, but all files are in one folder; give "
            "both the same"
        )


def _dtype_errors(config: Config) -> Iterator[str]:
    types, sent = config.data_types, config.communication_data_type
    kept = types.grad_accum_dtype
    if sent and kept and torch_name(sent) != torch_name(kept):
        yield (
            f"communication_data_type = {shown(sent)} and "
            f"data_types.grad_accum_dtype = {shown(kept)} differ, but "
            "minizero sends gradients in the dtype it adds them up in; "
            "leave one of the two out"
        )
    param, computed = types.param_dtype, config.dtypes.parameters
    if param and torch_name(param) != computed:
        yield (
            f"data_types.param_dtype = {shown(param)}, but by fp16.enabled "
            f"and bf16.enabled parameters are {computed}; leave it out"
        )


class Idle(NamedTuple):
    """Keys (patterns) that have no effect `when`, and why."""

    when: Callable[[Config], bool]
    keys: tuple[str, ...]
    why: str


def _on_nvme(config: Config) -> bool:
    return any(place.on == "nvme" for place in vars(config.plan).values())


def _options(config: Config, part: str, *kinds: type) -> Any:
    """The options of the optimizer or scheduler, if of one of the kinds."""
    section = getattr(config, part)
    options = None if section is None else section.params
    return options if isinstance(options, kinds) else None


def _adamw(config: Config) -> bool:
    adam = _options(config, "optimizer", AdamParams)
    return bool(adam and config.optimizer and config.optimizer.type == "AdamW")


def _one_cycle(config: Config, name: str) -> bool:
    """Whether the schedule is OneCycle with an option that is 0 or false."""
    cycle = _options(config, "scheduler", OneCycleParams)
    return bool(cycle and not getattr(cycle, name))


ZERO = "zero_optimization"
DYNAMIC = (
    "fp16.initial_scale_power",
    "fp16.loss_scale_window",
    "fp16.*hysteresis",
    "fp16.min_loss_scale",
)
IDLE = (
    Idle(
        lambda c: c.zero_optimization.stage < 3,
        (f"{ZERO}.offload_param.*", f"{ZERO}.stage3_*"),
        "parameters are sharded at stage 3 only, and the stage is "
        "{c.zero_optimization.stage}",
    ),
    Idle(
        lambda c: c.zero_optimization.stage < 1,
        (f"{ZERO}.offload_optimizer.*",),
        "at stage 0 every rank has all of the optimizer state, on its device",
    ),
    Idle(
        lambda c: not c.zero_optimization.overlap_comm,
        (
            f"{ZERO}.stage3_prefetch_bucket_size",
            f"{ZERO}.stage3_param_persistence_threshold",
            f"{ZERO}.stage3_max_live_parameters",
        ),
        "without overlap_comm each unit is gathered when it is used, and "
        "freed after that",
    ),
    *(
        Idle(
            lambda c, b=block: (  # type: ignore[misc]
                getattr(c.zero_optimization, b).device != "nvme"
            ),
            (
                f"{ZERO}.{block}.nvme_path",
                f"{ZERO}.{block}.buffer_*",
                f"{ZERO}.{block}.max_in_cpu",
            ),
            f'{ZERO}.{block}.device is not "nvme"',
        )
        for block in ("offload_param", "offload_optimizer")
    ),
    Idle(lambda c: not _on_nvme(c), ("aio.*",), 'nothing is on "nvme"'),
    Idle(
        lambda c: not c.fp16.enabled,
        ("fp16.*",),
        "fp16 is not enabled",
    ),
    Idle(
        lambda c: not c.bf16.enabled,
        ("bf16.*",),
        "bf16 is not enabled",
    ),
    Idle(
        lambda c: c.fp16.loss_scale > 0,
        DYNAMIC,
        "fp16.loss_scale = {c.fp16.loss_scale:g} is fixed",
    ),
    Idle(
        _adamw,
        ("optimizer.params.adam_w_mode",),
        "AdamW is AdamW; for L2 decay use the type Adam",
    ),
    Idle(
        lambda c: _one_cycle(c, "cycle_momentum"),
        ("scheduler.params.*_mom", "scheduler.params.decay_mom_rate"),
        "cycle_momentum is false",
    ),
    Idle(
        lambda c: _one_cycle(c, "decay_step_size"),
        ("scheduler.params.decay_lr_rate", "scheduler.params.decay_mom_rate"),
        "decay_step_size is 0, which is no decay",
    ),
)


def warnings(config: Config) -> Iterator[str]:
    """A sentence for what was asked for and has no effect.

    A key that stands at its default is as one that is not there.
    """
    left = changed(config)
    for when, keys, why in IDLE:
        if not when(config):
            continue
        idle = [k for k in left if any(fnmatchcase(k, p) for p in keys)]
        found = {k: left.pop(k) for k in idle}
        if found:
            yield _no_effect(found, why.format(c=config))
    for name, (entry, value) in left.items():
        about = entry.about
        if about.ignored and value != about.honours:
            yield _no_effect({name: (entry, value)}, about.ignored)
    schedule = _options(config, "scheduler", WarmupDecayParams, WarmupCosineParams)
    if schedule and schedule.total_num_steps < schedule.warmup_num_steps:
        yield (
            f"scheduler.params.total_num_steps = {schedule.total_num_steps} "
            "ends before the warm-up does, at warmup_num_steps = "
            f"{schedule.warmup_num_steps}"
        )


def _no_effect(found: dict[str, tuple[Entry, Any]], why: str) -> str:
    names = [f"{name} = {shown(value)}" for name, (_, value) in found.items()]
    have = "has" if len(names) == 1 else "have"
    return f"{', '.join(names)} {have} no effect: {why}"
