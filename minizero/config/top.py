"""A whole config, checked and complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from minizero.memory.plan import Plan

from .offload import Aio, OffloadOptimizer, OffloadParam
from .optimizer import Optimizer
from .scheduler import Scheduler
from .schema import key, torch_name
from .train import BF16, FP16, ActivationCheckpointing, Checkpoint, DataTypes
from .zero import ZeroOptimization

_NAMES = ("fp32", "fp16", "bf16")


class Dtypes(NamedTuple):
    """Names of torch dtypes, such as "float32".

    `reduce`: what gradients are added up and sent in. `buffers`: of the
    model's floating-point buffers; None leaves them as they come.
    """

    parameters: str
    reduce: str
    buffers: str | None


@dataclass(frozen=True, kw_only=True)
class Config:
    """A config as DeepSpeed 0.19 has it: the same keys, defaults and units.

    `world_size`: the number of ranks it was completed for. `warnings`: a
    sentence for all that was asked for and has no effect.
    """

    train_batch_size: int = key(
        None,
        "Samples in one step of all ranks.",
        "the engine",
        unit="samples",
        least=1,
        unset="from the next two",
    )
    train_micro_batch_size_per_gpu: int = key(
        None,
        "Samples of one rank in one forward.",
        "the engine's data loader",
        unit="samples",
        least=1,
        unset="from the other two",
    )
    gradient_accumulation_steps: int = key(
        None,
        "Micro-batches of one step.",
        "the engine",
        unit="micro-batches",
        least=1,
        unset="from the other two, or 1",
    )
    gradient_clipping: float = key(
        1.0,
        "Largest L2 norm of all gradients together; 0 does not clip.",
        "`clip_grad_norm`",
        least=0,
    )
    optimizer: Optimizer | None = key(
        None,
        "How parameters are updated.",
        "the engine",
        unset="the one given to `initialize`",
    )
    scheduler: Scheduler | None = key(
        None,
        "How the learning rate moves.",
        "the engine",
        unset="the one given to `initialize`",
    )
    fp16: FP16 = key(FP16(), "fp16 with a loss scale.", "`MixedPrecision`")
    bf16: BF16 = key(BF16(), "bf16.", "`MixedPrecision`")
    data_types: DataTypes = key(
        DataTypes(), "Other dtypes.", "`MixedPrecision`"
    )
    communication_data_type: str | None = key(
        None,
        "In which gradients are added up and sent.",
        "`reduce` of `MixedPrecision`",
        one_of=_NAMES,
        unset="the parameters'",
    )
    zero_optimization: ZeroOptimization = key(
        ZeroOptimization(), "What is sharded, and where.", "`parallelize`"
    )
    aio: Aio = key(Aio(), "Reading and writing files.", "`NVMe`")
    activation_checkpointing: ActivationCheckpointing = key(
        ActivationCheckpointing(),
        "What checkpointed modules keep, and where.",
        "`Checkpointing`",
    )
    checkpoint: Checkpoint = key(
        Checkpoint(), "Saving.", "`engine.save_checkpoint`"
    )
    zero_allow_untested_optimizer: bool = key(
        False,
        "Shard an optimizer that DeepSpeed has no test for, such as SGD.",
        ignored="every optimizer is tried on pieces of a parameter, and "
        "sharded if it updates them as it does the whole",
        honours=True,
    )
    zero_force_ds_cpu_optimizer: bool = key(
        True,
        "Offload with DeepSpeed's own Adam only.",
        ignored="the optimizer that you give is the one that runs",
        honours=False,
    )
    steps_per_print: int | None = key(
        None,
        "Print counts, learning rates, loss scale and samples/s every so "
        "often.",
        "the engine",
        unit="steps",
        least=1,
        unset="never",
    )
    wall_clock_breakdown: bool = key(
        False,
        "Time forward, backward and step, and count FLOPs; print at each "
        "step.",
        "the engine",
    )
    memory_breakdown: bool = key(
        False,
        "Print memory after each phase.",
        ignored="`minizero.see_memory_usage` prints it where you want it",
    )
    dump_state: bool = key(
        False,
        "Print the engine's state at the start.",
        ignored="print the `Config`: it is complete",
    )
    dataloader_drop_last: bool = key(
        False, "Drop the last, smaller batch.", "the engine's data loader"
    )
    disable_python_gc: bool = key(
        False,
        "Collect no reference cycles while training.",
        ignored="call gc.disable() in the script",
    )
    vocabulary_size: int | None = key(
        None,
        "Warn if it is no multiple of 8.",
        ignored="the shapes of the model are its own",
        unit="tokens",
        unset="unknown",
        least=1,
    )
    log_level: str | None = key(
        None,
        "How much DeepSpeed logs.",
        ignored="use Python's `logging` and `warnings`",
        unset="DeepSpeed's own",
    )

    world_size: int = 1
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> Plan:
        """Where each category of state lives."""
        zero = self.zero_optimization
        optimizer = zero.offload_optimizer.device if zero.stage else "none"
        param = zero.offload_param.device if zero.stage == 3 else "none"
        return Plan.stage(
            zero.stage,
            offload_optimizer=None if optimizer == "none" else optimizer,
            offload_param=None if param == "none" else param,
        )

    @property
    def files(self) -> dict[str, Any] | None:
        """The options of the NVMe home; None if nothing goes to files."""
        zero, plan = self.zero_optimization, self.plan
        blocks: list[OffloadParam | OffloadOptimizer] = []
        options: dict[str, Any] = {}
        if plan.optimizer.on == "nvme":
            blocks.append(zero.offload_optimizer)
        if plan.parameters.on == "nvme":
            blocks.append(zero.offload_param)
            options["buffer_size"] = zero.offload_param.buffer_size
        if not blocks:
            return None
        return options | {
            "folder": blocks[0].nvme_path,
            "buffer_count": max(block.buffer_count for block in blocks),
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
