"""A whole config: its keys together, and what they mean for the engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from ..memory.plan import Plan
from . import schema
from .schema import Count, Dtype, Section

ZERO, HPZ, MICS = "zero_optimization", "zero_hpz_partition_size", "mics_shard_size"
# accelerate writes Infinity for "never"
Interval = Annotated[int, BeforeValidator(lambda n: 0 if n == math.inf else n)]


class Dtypes(NamedTuple):
    """Names of torch dtypes, such as "float32"."""

    parameters: str
    reduce: str  # gradients are summed and sent in it
    buffers: str | None  # floating-point buffers; None leaves them unchanged


class Config(Section):
    """A complete config, with the keys, defaults and units of DeepSpeed 0.19."""

    # `read` completes these three, so a `Config` has no None
    train_batch_size: Count = Field(None)  # type: ignore[assignment]
    train_micro_batch_size_per_gpu: Count = Field(None)  # type: ignore[assignment]
    gradient_accumulation_steps: Count = Field(None)  # type: ignore[assignment]
    gradient_clipping: float = Field(1.0, ge=0)
    optimizer: schema.OptimizerSection | None = None
    scheduler: schema.SchedulerSection | None = None
    fp16: schema.FP16 = schema.FP16()
    bf16: schema.BF16 = schema.BF16()
    data_types: schema.DataTypes = schema.DataTypes()
    communication_data_type: Dtype | None = None
    zero_optimization: schema.ZeroOptimization = schema.ZeroOptimization()
    aio: schema.Aio = schema.Aio()
    activation_checkpointing: schema.Checkpointing = schema.Checkpointing()
    steps_per_print: Interval = Field(0, ge=0)
    dataloader_drop_last: bool = False

    world_size: int = 1  # the number of ranks it was completed for
    warnings: tuple[str, ...] = ()  # a sentence for each thing without effect

    @property
    def offload(self) -> tuple[str, str]:
        """Where optimizer state and parameters are stored: "none", "cpu" or "nvme"."""
        zero = self.zero_optimization
        optimizer = zero.offload_optimizer.device if zero.stage else "none"
        return optimizer, zero.offload_param.device if zero.stage == 3 else "none"

    @property
    def groups(self) -> tuple[int | None, int | None]:
        """Ranks in each MiCS group, and in each hpZ group; None: there are no groups."""
        zero = self.zero_optimization
        mics = zero.mics_shard_size if zero.stage else -1
        hpz = zero.zero_hpz_partition_size if zero.stage == 3 else 1
        return None if mics < 1 else mics, None if hpz == 1 else hpz

    @property
    def plan(self) -> Plan:
        """Where each category of state is placed."""
        optimizer, param = (None if on == "none" else on for on in self.offload)
        mics, hpz = self.groups
        plan = Plan.stage(self.zero_optimization.stage, optimizer, param, mics)
        if hpz is None:
            return plan
        return replace(plan, parameters=replace(plan.parameters, group=hpz))

    @property
    def bits(self) -> tuple[int | None, int | None]:
        """Bits in which weights and gradients are sent; None: those of their dtype."""
        zero = self.zero_optimization
        weights = zero.zero_quantized_weights and zero.stage == 3
        gradients = zero.zero_quantized_gradients and zero.stage > 0
        return 8 if weights else None, 4 if gradients else None

    @property
    def files(self) -> dict[str, Any] | None:
        """The options of the disk storage; None if nothing is stored in files."""
        zero = self.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param)
        used = [s for s, on in zip(sections, self.offload, strict=True) if on == "nvme"]
        if not used:
            return None
        count = max(section.buffer_count for section in used)
        options: dict[str, Any] = {"folder": used[0].nvme_path, "buffer_count": count}
        if zero.offload_param in used:
            options["buffer_size"] = zero.offload_param.buffer_size
        return options | self.aio.model_dump()

    @property
    def dtypes(self) -> Dtypes:
        """The dtypes to train in; `MixedPrecision` is needed unless all are float32."""
        half = "bfloat16" if self.bf16.enabled else "float32"
        parameters = "float16" if self.fp16.enabled else half
        types = self.data_types
        reduce = self.communication_data_type or types.grad_accum_dtype or parameters
        return Dtypes(parameters, reduce, types.buffer_dtype)

    def contradictions(self) -> Iterator[str]:
        """A sentence for each pair of keys that contradict each other."""
        zero, types = self.zero_optimization, self.data_types
        states, param = zero.offload_optimizer, zero.offload_param
        (mics, hpz), (_, param_device) = self.groups, self.offload
        for name, section in (("offload_optimizer", states), ("offload_param", param)):
            if section.device == "nvme" and not section.nvme_path:
                yield (
                    f'{ZERO}.{name}.device is "nvme", but there is no nvme_path beside '
                    "it; give the folder to put files in"
                )
        paths = [states.nvme_path, param.nvme_path]
        if states.device == param.device == "nvme" and all(paths) and len({*paths}) > 1:
            yield (
                f"{ZERO} has two nvme_path, {paths[0]} and {paths[1]}, but all files "
                "are in one folder; give both the same"
            )
        delayed, on_disk = states.delayed_update, "nvme" in self.offload
        if delayed and (states.device != "cpu" or on_disk):
            yield (
                f"{ZERO}.offload_optimizer.delayed_update = true, but only what is in "
                'host memory is updated late; give "device": "cpu" and no "nvme"'
            )
        if mics and hpz:
            yield f"{ZERO}.{MICS} and {HPZ} both make groups; leave one of them out"
        for name, size in ((MICS, mics), (HPZ, hpz)):
            if size and (size == 1 or self.world_size % size):
                yield (
                    f"{ZERO}.{name} = {size}, but {self.world_size} ranks cannot shard "
                    f"in groups of {size}; use a number above 1 that divides them"
                )
            if size and (delayed or on_disk):
                yield f"{ZERO}.{name}: groups take no nvme and no delayed_update"
        if hpz and param_device != "none":
            yield f"{ZERO}.{HPZ} takes no offload_param; use {MICS}, or leave it out"
        if self.fp16.enabled and self.bf16.enabled:
            yield "fp16 and bf16 are both enabled; disable one of them"
        if types.grad_accum_dtype not in (None, self.dtypes.reduce):
            yield (
                f"communication_data_type = {self.communication_data_type} and "
                f"data_types.grad_accum_dtype = {types.grad_accum_dtype} differ, but "
                "gradients are sent in the dtype in which they are summed; leave one out"
            )
