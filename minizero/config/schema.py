"""The sections of a config: their keys, types, bounds and defaults.

Names, defaults and units are DeepSpeed's; the config reference describes each key.
Keys that minizero accepts without effect, or refuses, are in `ignored`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Device = Literal["none", "cpu", "nvme"]
OPTIMIZERS = ("Adam", "AdamW", "SGD", "Adagrad", "Muon", "FusedAdam", "CPUAdam")
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
SPELLINGS = {
    **{name.lower(): name for name in OPTIMIZERS + SCHEDULERS},
    **{"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"},
}
AnySpelling = BeforeValidator(lambda name: SPELLINGS.get(str(name).lower(), name))
Dtype = Annotated[Literal["float32", "float16", "bfloat16"], AnySpelling]
OptimizerType = Annotated[Literal[OPTIMIZERS], AnySpelling]  # type: ignore[valid-type]
SchedulerType = Annotated[Literal[SCHEDULERS], AnySpelling]  # type: ignore[valid-type]
Count = Annotated[int, Field(ge=1)]
Elements = Annotated[int, Field(ge=0)]


class Section(BaseModel):
    """Part of a config."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class OffloadSection(Section):
    """Storage off the accelerator."""

    device: Device = "none"
    nvme_path: str | None = None
    buffer_count: Count = 4  # the larger count of both sections is used


class OffloadParam(OffloadSection):
    """Where sharded parameters are stored between uses (stage 3)."""

    buffer_count: Count = 5
    buffer_size: int = Field(100_000_000, ge=64, multiple_of=64)  # elements


class OffloadOptimizer(OffloadSection):
    """Where optimizer states are stored and updated (stages 1 to 3)."""

    delayed_update: bool = False  # minizero's own key


class Aio(Section):
    """How files are read and written, with `nvme`."""

    block_size: int = Field(1_048_576, ge=4096, multiple_of=4096)  # bytes
    queue_depth: Count = 8


class ZeroOptimization(Section):
    """What is sharded, where it is stored, and in what portions it is sent."""

    stage: int = Field(0, ge=0, le=3)
    offload_optimizer: OffloadOptimizer = OffloadOptimizer()
    offload_param: OffloadParam = OffloadParam()
    overlap_comm: bool = Field(default_factory=lambda given: given.get("stage") == 3)
    zero_hpz_partition_size: Count = 1
    mics_shard_size: int = Field(-1, ge=-1)
    zero_quantized_weights: bool = False
    zero_quantized_gradients: bool = False
    reduce_bucket_size: Count = 500_000_000  # elements, as all sizes
    stage3_prefetch_bucket_size: Elements = 50_000_000
    stage3_param_persistence_threshold: Elements = 100_000
    stage3_max_live_parameters: Elements = 1_000_000_000
    stage3_gather_16bit_weights_on_model_save: bool = False
    compute_grad_norm: bool = True


class OptimizerSection(Section):
    """How parameters are updated, unless `initialize` is given an optimizer."""

    type: OptimizerType
    params: dict[str, Any] = {}


class SchedulerSection(Section):
    """How the learning rate changes, unless `initialize` is given a scheduler."""

    type: SchedulerType
    params: dict[str, Any] = {}


class FP16(Section):
    """fp16 parameters and gradients, with a loss scale."""

    enabled: bool = False
    loss_scale: float = Field(0.0, ge=0)  # 0 adapts it to the gradients
    initial_scale_power: int = Field(16, ge=0, le=127)  # the first scale is 2^16
    loss_scale_window: Count = 1000
    hysteresis: Count = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: Count = 1


class BF16(Section):
    """bf16 parameters and gradients, without a loss scale."""

    enabled: bool = False
    check_grad_overflow: bool = True


class DataTypes(Section):
    """Dtypes that the sections `fp16` and `bf16` do not set."""

    grad_accum_dtype: Dtype | None = None
    buffer_dtype: Dtype | None = None


class Checkpointing(Section):
    """How `deepspeed.checkpointing.checkpoint` keeps inputs; it wraps no module."""

    cpu_checkpointing: bool = False


def walk(
    section: type[Section], path: str = ""
) -> Iterator[tuple[str, type[Section] | None]]:
    """Every key: its dotted name, and its section if it is one."""
    for name, field in section.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
        yield f"{path}{name}", inner
        if inner is not None:
            yield from walk(inner, f"{path}{name}.")
