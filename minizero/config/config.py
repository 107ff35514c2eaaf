"""A whole config, checked and complete."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from annotated_types import Ge
from pydantic import field_validator

from .keys import UNSET, Anyway, NotNegative, Samples, Section
from .sections import (
    BF16,
    FP16,
    ActivationCheckpointing,
    Checkpoint,
    DataTypes,
    FlopsProfiler,
    Monitor,
    Optimizer,
    Scheduler,
    torch_name,
)
from .zero import Aio, OffloadOptimizer, OffloadParam, ZeroOptimization

if TYPE_CHECKING:
    from minizero.memory.plan import Plan


class Dtypes(NamedTuple):
    """Names of torch dtypes, such as "float32".

    `reduce`: what gradients are added up and sent in. `buffers`: of the
    model's floating-point buffers; None leaves them as they come.
    """

    parameters: str
    reduce: str
    buffers: str | None


class Config(Section):
    """A config as DeepSpeed 0.19 has it: the same keys, defaults and units.

    `world_size`: the number of ranks it was completed for. `warnings`: a
    sentence for all that was asked for and has no effect.
    """

    train_batch_size: Samples = UNSET
    """Samples in one step of all ranks. Unset: from the next two. Done: the engine."""
    train_micro_batch_size_per_gpu: Samples = UNSET
    """Samples of one rank in one forward. Unset: from the other two. Done: the engine's
    data loader."""
    gradient_accumulation_steps: Annotated[int, "micro-batches", Ge(1)] = UNSET
    """Micro-batches of one step. Unset: from the other two, or 1. Done: the engine."""
    gradient_clipping: NotNegative = 1.0
    """Largest L2 norm of all gradients together; 0 does not clip. Done:
    `clip_grad_norm`."""
    optimizer: Optimizer | None = None
    """How parameters are updated. Unset: the one given to `initialize`. Done: the
    engine."""
    scheduler: Scheduler | None = None
    """How the learning rate moves. Unset: the one given to `initialize`. Done: the
    engine."""
    fp16: FP16 = FP16()
    """fp16 with a loss scale. Done: `MixedPrecision`."""
    bf16: BF16 = BF16()
    """bf16. Done: `MixedPrecision`."""
    data_types: DataTypes = DataTypes()
    """Other dtypes. Done: `MixedPrecision`."""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """In which gradients are added up and sent. Unset: the parameters'. Done: `reduce`
    of `MixedPrecision`."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """What is sharded, and where. Done: `parallelize`."""
    aio: Aio = Aio()
    """Reading and writing files. Done: `NVMe`."""
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing()
    """What checkpointed modules keep, and where. Done: `Recompute`."""
    checkpoint: Checkpoint = Checkpoint()
    """Saving. Done: `engine.save_checkpoint`."""
    zero_allow_untested_optimizer: Annotated[bool, Anyway(True)] = False
    """Shard an optimizer that DeepSpeed has no test for, such as SGD. No effect: every
    optimizer is tried on pieces of a parameter, and sharded if it updates them as it
    does the whole."""
    zero_force_ds_cpu_optimizer: Annotated[bool, Anyway(False)] = True
    """Offload with DeepSpeed's own Adam only. No effect: the optimizer that you give is
    the one that runs."""
    tensorboard: Monitor = Monitor()
    """Files for TensorBoard. Done: `torch.utils.tensorboard`."""
    csv_monitor: Monitor = Monitor()
    """A CSV file for each value. Done: Python's `csv`."""
    flops_profiler: FlopsProfiler = FlopsProfiler()
    """Counting FLOPs. Done: `torch.utils.flop_counter`."""
    steps_per_print: Annotated[int, "steps", Ge(0)] | None = None
    """Print counts, learning rates, loss scale and samples/s every so often; 0 and
    infinity: never. Unset: never. Done: the engine."""
    wall_clock_breakdown: bool = False
    """Time forward, backward and step, and count FLOPs; print at each step. Done: the
    engine."""
    memory_breakdown: bool = False
    """Print memory after each phase. No effect: `minizero.see_memory_usage` prints it
    where you want it."""
    dump_state: bool = False
    """Print the engine's state at the start. No effect: print the `Config`: it is
    complete."""
    dataloader_drop_last: bool = False
    """Drop the last, smaller batch. Done: the engine's data loader."""
    disable_python_gc: bool = False
    """Collect no reference cycles while training. No effect: call gc.disable() in the
    script."""
    vocabulary_size: Annotated[int, "tokens", Ge(1)] | None = None
    """Warn if it is no multiple of 8. Unset: unknown. No effect: the shapes of the
    model are its own."""
    log_level: str | None = None
    """How much DeepSpeed logs. Unset: DeepSpeed's own. No effect: use Python's
    `logging` and `warnings`."""

    world_size: int = 1
    warnings: tuple[str, ...] = ()

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: Any) -> Any:
        return 0 if value == math.inf else value

    @property
    def places(self) -> tuple[str, str]:
        """Where optimizer state and parameters rest: "none", "cpu" or "nvme"."""
        zero = self.zero_optimization
        optimizer = zero.offload_optimizer.device if zero.stage else "none"
        return optimizer, zero.offload_param.device if zero.stage == 3 else "none"

    @property
    def plan(self) -> Plan:
        """Where each category of state lives."""
        from minizero.memory.plan import Plan  # with torch, which reading does without

        optimizer, param = (None if on == "none" else on for on in self.places)
        together, secondary = self.groups
        plan = Plan.stage(self.zero_optimization.stage, optimizer, param, together)
        if secondary is None:
            return plan
        return replace(plan, parameters=replace(plan.parameters, group=secondary))

    @property
    def groups(self) -> tuple[int | None, int | None]:
        """Ranks that share a copy of all that is sharded, or of the parameters alone."""
        zero = self.zero_optimization
        together = zero.mics_shard_size if zero.stage else -1
        secondary = zero.zero_hpz_partition_size if zero.stage == 3 else 1
        return None if together < 1 else together, None if secondary == 1 else secondary

    @property
    def bits(self) -> tuple[int | None, int | None]:
        """In how many bits weights and gradients are sent; None: as they are."""
        zero = self.zero_optimization
        weights = zero.zero_quantized_weights and zero.stage == 3
        gradients = zero.zero_quantized_gradients and zero.stage > 0
        return 8 if weights else None, 4 if gradients else None

    @property
    def files(self) -> dict[str, Any] | None:
        """The options of the NVMe home; None if nothing goes to files."""
        zero = self.zero_optimization
        used: list[OffloadOptimizer | OffloadParam] = []
        options: dict[str, Any] = {}
        optimizer, param = self.places
        if optimizer == "nvme":
            used.append(zero.offload_optimizer)
        if param == "nvme":
            used.append(zero.offload_param)
            options["buffer_size"] = zero.offload_param.buffer_size
        if not used:
            return None
        return options | {
            "folder": used[0].nvme_path,
            "buffer_count": max(block.buffer_count for block in used),
            "block_size": self.aio.block_size,
            "queue_depth": self.aio.queue_depth,
        }

    @property
    def dtypes(self) -> Dtypes:
        """What `MixedPrecision` is made with; all float32 needs none."""
        parameters = "float32"
        if self.fp16.enabled or self.bf16.enabled:
            parameters = "float16" if self.fp16.enabled else "bfloat16"
        types = self.data_types
        reduce = self.communication_data_type or types.grad_accum_dtype
        buffers = types.buffer_dtype
        return Dtypes(
            parameters,
            torch_name(reduce) if reduce else parameters,
            torch_name(buffers) if buffers else None,
        )
