"""In which dtypes is computed, and what is kept for backward and after."""

from __future__ import annotations

from dataclasses import dataclass

from .schema import DTYPES, key

_NAMES = tuple(name for names in DTYPES.values() for name in names)


@dataclass(frozen=True, kw_only=True)
class FP16:
    """fp16 parameters and gradients, with a loss scale."""

    enabled: bool = key(
        False, "Compute in fp16.", "`parameters` of `MixedPrecision`"
    )
    loss_scale: float = key(
        0.0,
        "A fixed loss scale; 0 adapts it to the gradients.",
        "`LossScale`, and for 0 `DynamicLossScale`",
        least=0,
        advice={"dynamic": "0 adapts the scale"},
    )
    initial_scale_power: int = key(
        16,
        "The adapted scale starts at 2 to this power.",
        "`initial_scale_power` of `DynamicLossScale`",
        least=0,
        most=127,
    )
    loss_scale_window: int = key(
        1000,
        "Double the scale after so many steps without an overflow.",
        "`loss_scale_window` of `DynamicLossScale`",
        unit="steps",
        least=1,
    )
    hysteresis: int = key(
        2,
        "Halve the scale at this overflow, not before.",
        "`hysteresis` of `DynamicLossScale`",
        unit="overflows",
        least=1,
    )
    consecutive_hysteresis: bool = key(
        False,
        "Count overflows anew after each step without one.",
        "`consecutive_hysteresis` of `DynamicLossScale`",
    )
    min_loss_scale: int = key(
        1,
        "The adapted scale is never smaller.",
        "`min_loss_scale` of `DynamicLossScale`",
        least=1,
    )
    auto_cast: bool = key(
        False,
        "Cast the inputs of the model to fp16.",
        ignored="floating-point inputs are always cast",
        honours=True,
    )


@dataclass(frozen=True, kw_only=True)
class BF16:
    """bf16 parameters and gradients, without a loss scale."""

    enabled: bool = key(
        False, "Compute in bf16.", "`parameters` of `MixedPrecision`"
    )
    check_grad_overflow: bool = key(
        True,
        "Skip a step whose gradients are not finite.",
        "`LossScale(1)`, and for false no test",
    )
    immediate_grad_update: bool = key(
        False,
        "Add a gradient to its buffer at once.",
        ignored="gradients are made in their buffer",
        honours=True,
    )


@dataclass(frozen=True, kw_only=True)
class DataTypes:
    """Dtypes of what is neither fp16 nor bf16 by these sections."""

    grad_accum_dtype: str | None = key(
        None,
        "In which gradients are added up over micro-batches.",
        "`reduce` of `MixedPrecision`",
        one_of=_NAMES,
        unset="the parameters'",
    )
    param_dtype: str | None = key(
        None,
        "Of the parameters; it must say what fp16 or bf16 say.",
        "a check",
        one_of=_NAMES,
        unset="by fp16 and bf16",
    )
    buffer_dtype: str | None = key(
        None,
        "Of the model's floating-point buffers.",
        "`buffers` of `MixedPrecision`",
        one_of=_NAMES,
        unset="as they come",
    )


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing:
    """How checkpointed modules keep what they save; it wraps none itself."""

    cpu_checkpointing: bool = key(
        False,
        "Keep it in host memory until backward.",
        "`Offloaded`, as `store` of `Checkpointing`",
    )
    partition_activations: bool = key(
        False,
        "Keep a part of it on each tensor-parallel rank.",
        ignored="ranks of data parallelism hold different activations; see "
        "cpu_checkpointing",
    )
    number_checkpoints: int | None = key(
        None,
        "How many checkpoints a contiguous buffer has room for.",
        ignored="there is no such buffer",
        unit="checkpoints",
        unset="none",
        least=1,
    )
    contiguous_memory_optimization: bool = key(
        False,
        "Keep checkpoints in one contiguous buffer.",
        ignored="PyTorch's allocator keeps them",
    )
    synchronize_checkpoint_boundary: bool = key(
        False,
        "Let the device finish at each checkpoint.",
        ignored="nothing needs it; wall_clock_breakdown synchronizes",
    )
    profile: bool = key(
        False,
        "Time each checkpoint.",
        ignored="the tracker's trace has forward and backward of each unit",
    )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """How checkpoints are saved; minizero has a format of its own."""

    tag_validation: str = key(
        "Warn",
        "What happens when ranks save under different tags.",
        ignored="different tags are always an error",
        one_of=("Ignore", "Warn", "Fail"),
        honours="Fail",
    )
    load_universal: bool = key(
        False,
        "Load what was converted for another number of ranks.",
        ignored="every checkpoint loads on any number of ranks",
        honours=True,
    )
    checkpoint_serialization: bool = key(
        True,
        "Pickle tensors as such.",
        ignored="nothing is pickled: tensors are in safetensors files",
        honours=False,
    )
