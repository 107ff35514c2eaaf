"""Keys that contradict each other, and keys that have no effect together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

from .keys import changed, shown
from .sections import (
    OneCycleParams,
    WarmupCosineParams,
    WarmupDecayParams,
    torch_name,
)

if TYPE_CHECKING:
    from .config import Config


def errors(config: Config) -> Iterator[str]:
    """A sentence for each contradiction."""
    yield from _offload_errors(config)
    yield from _group_errors(config)
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


def _offload_errors(config: Config) -> Iterator[str]:
    paths = {}
    for name in ("offload_optimizer", "offload_param"):
        block = getattr(config.zero_optimization, name)
        if block.device == "nvme" and not block.nvme_path:
            yield (
                f'{ZERO}.{name}.device is "nvme", but there is no nvme_path beside '
                "it; give the folder to put files in"
            )
        elif block.device == "nvme":
            paths[name] = shown(block.nvme_path)
    if len(set(paths.values())) > 1:
        yield (
            f"{ZERO} has the nvme_path {' and '.join(paths.values())} in "
            f"{' and '.join(paths)}, but all files are in one folder; give both the "
            "same"
        )
    block = config.zero_optimization.offload_optimizer
    if block.delayed_update and (block.device != "cpu" or config.places[1] == "nvme"):
        yield (
            f"{ZERO}.offload_optimizer.delayed_update = true, but only what is in host "
            'memory is updated late; give "device": "cpu", and offload_param no "nvme"'
        )


def _group_errors(config: Config) -> Iterator[str]:
    zero, ranks = config.zero_optimization, config.world_size
    if all(config.groups):
        yield (
            f"{ZERO}.mics_shard_size and zero_hpz_partition_size both make groups; the "
            "first shards all in them, the second parameters alone: leave one out"
        )
    for name, size in zip(GROUPS, config.groups, strict=True):
        if size is None:
            continue
        if size == 1:
            yield f"{ZERO}.{name} = 1 shards nothing; use stage 0, or leave it out"
        elif ranks % size:
            fits = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
            yield (
                f"{ZERO}.{name} = {size}, but groups of {size} cannot be made of "
                f"{ranks} ranks; use a number that divides them"
                + (f": {', '.join(fits)}" if fits else ", or leave it out")
            )
        elif "nvme" in config.places or zero.offload_optimizer.delayed_update:
            yield (
                f"{ZERO}.{name} = {size}: in groups a rank has several shards of a "
                "buffer, which files and a delayed update do not serve; offload to "
                '"cpu" without delayed_update'
            )
        elif name == GROUPS[1] and config.places[1] != "none":
            yield (
                f"{ZERO}.{name} = {size} keeps a copy of the parameters on the device "
                "for each group; leave offload_param out, or use mics_shard_size"
            )


def _dtype_errors(config: Config) -> Iterator[str]:
    types, sent = config.data_types, config.communication_data_type
    kept = types.grad_accum_dtype
    if sent and kept and torch_name(sent) != torch_name(kept):
        yield (
            f"communication_data_type = {shown(sent)} and data_types.grad_accum_dtype "
            f"= {shown(kept)} differ, but minizero sends gradients in the dtype it "
            "adds them up in; leave one of the two out"
        )
    param, computed = types.param_dtype, config.dtypes.parameters
    if param and torch_name(param) != computed:
        yield (
            f"data_types.param_dtype = {shown(param)}, but by fp16.enabled and "
            f"bf16.enabled parameters are {computed}; leave it out"
        )


class Idle(NamedTuple):
    """Keys (patterns) that have no effect `when`, and why."""

    when: Callable[[Config], bool]
    keys: tuple[str, ...]
    why: str


def _cycling_without(name: str) -> Callable[[Config], bool]:
    """Whether the schedule is OneCycle with an option that is 0 or false."""

    def when(config: Config) -> bool:
        options = config.scheduler and config.scheduler.params
        return isinstance(options, OneCycleParams) and not getattr(options, name)

    return when


def _files_without_nvme(block: str) -> Idle:
    keys = [f"{ZERO}.{block}.{key}" for key in ("nvme_path", "buffer_*", "max_in_cpu")]
    return Idle(
        lambda c: getattr(c.zero_optimization, block).device != "nvme",
        tuple(keys),
        f'{ZERO}.{block}.device is not "nvme"',
    )


ZERO = "zero_optimization"
GROUPS = ("mics_shard_size", "zero_hpz_partition_size")
IDLE = (
    Idle(
        lambda c: c.zero_optimization.stage < 3,
        (
            f"{ZERO}.offload_param.*",
            f"{ZERO}.stage3_*",
            f"{ZERO}.{GROUPS[1]}",
            f"{ZERO}.zero_quantized_weights",
        ),
        "parameters are sharded at stage 3 only, and the stage is "
        "{c.zero_optimization.stage}",
    ),
    Idle(
        lambda c: c.zero_optimization.stage < 1,
        (
            f"{ZERO}.offload_optimizer.*",
            f"{ZERO}.{GROUPS[0]}",
            f"{ZERO}.zero_quantized_gradients",
        ),
        "at stage 0 every rank has all of the optimizer state, on its device",
    ),
    Idle(
        lambda c: not c.zero_optimization.overlap_comm,
        (
            f"{ZERO}.stage3_prefetch_bucket_size",
            f"{ZERO}.stage3_param_persistence_threshold",
            f"{ZERO}.stage3_max_live_parameters",
        ),
        "without overlap_comm each unit is gathered when it is used, and freed after "
        "that",
    ),
    _files_without_nvme("offload_param"),
    _files_without_nvme("offload_optimizer"),
    Idle(lambda c: "nvme" not in c.places, ("aio.*",), 'nothing is on "nvme"'),
    Idle(lambda c: not c.fp16.enabled, ("fp16.*",), "fp16 is not enabled"),
    Idle(lambda c: not c.bf16.enabled, ("bf16.*",), "bf16 is not enabled"),
    Idle(
        lambda c: c.fp16.loss_scale > 0,
        (
            "fp16.initial_scale_power",
            "fp16.loss_scale_window",
            "fp16.*hysteresis",
            "fp16.min_loss_scale",
        ),
        "fp16.loss_scale = {c.fp16.loss_scale:g} is fixed",
    ),
    Idle(
        lambda c: c.optimizer is not None and c.optimizer.type == "AdamW",
        ("optimizer.params.adam_w_mode",),
        "AdamW is AdamW; for L2 decay use the type Adam",
    ),
    Idle(
        _cycling_without("cycle_momentum"),
        ("scheduler.params.*_mom", "scheduler.params.decay_mom_rate"),
        "cycle_momentum is false",
    ),
    Idle(
        _cycling_without("decay_step_size"),
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
        found = [f"{name} = {shown(left.pop(name)[1])}" for name in idle]
        if found:
            have = "has" if len(found) == 1 else "have"
            yield f"{', '.join(found)} {have} no effect: {why.format(c=config)}"
    for name, (key, value) in left.items():
        if key.ignored and value != key.anyway:
            yield f"{name} = {shown(value)} has no effect: {key.ignored}"
    schedule = config.scheduler and config.scheduler.params
    if isinstance(schedule, WarmupDecayParams | WarmupCosineParams):
        total, warm = schedule.total_num_steps, schedule.warmup_num_steps
        if total < warm:
            yield (
                f"scheduler.params.total_num_steps = {total} ends before the warm-up "
                f"does, at warmup_num_steps = {warm}"
            )
