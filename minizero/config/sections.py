"""How parameters are updated, in which dtypes, and what is kept."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from .keys import UNSET, Anyway, NotNegative, Rates, Section, Share, Shares, Steps

Dtype = Literal[
    "fp32", "float32", "float", "torch.float32", "bf16", "bfloat16", "torch.bfloat16",
    "fp16", "float16", "half", "torch.float16",
]  # fmt: skip
_TORCH = {"fp32": "float32", "float": "float32", "bf16": "bfloat16"}
_TORCH |= {"fp16": "float16", "half": "float16"}


def torch_name(dtype: str) -> str:
    """The name that torch has for a dtype, for any that a config has."""
    name = dtype.removeprefix("torch.")
    return _TORCH.get(name, name)


class _Adam(Section):
    lr: NotNegative = 0.001
    """Learning rate. Done: `lr`."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """Decay of the averages of the gradient and of its square. Done: `betas`."""
    eps: NotNegative = 1e-08
    """Added to the root. Done: `eps`."""


class KernelAdamParams(_Adam):
    """Adam in a kernel of `minizero.kernels`."""

    weight_decay: NotNegative = 0.0
    """Weight decay. Done: `weight_decay`."""
    adam_w_mode: bool = True
    """Decoupled weight decay. Done: `adam_w_mode`."""


class AdamParams(_Adam):
    """Adam with decoupled weight decay, unless adam_w_mode is false."""

    weight_decay: NotNegative | None = None
    """Weight decay. Unset: 0, and with torch_adam what torch's class has. Done:
    `weight_decay`."""
    adam_w_mode: bool = True
    """Decoupled weight decay for the type Adam too. Done: `torch.optim.AdamW`, else
    `Adam`."""
    torch_adam: bool = False
    """torch's own implementation, not a fused kernel. Done: `fused`, left to torch."""
    fused: bool | None = None
    """torch's fused kernel. Unset: true, and with torch_adam left to torch. Done:
    `fused`."""
    fp32_optimizer_states: bool = True
    """fp32 states on the host. No effect: they have the dtype of what is updated:
    fp32."""


class SGDParams(Section):
    """Stochastic gradient descent, as `torch.optim.SGD`."""

    lr: NotNegative = 0.001
    """Learning rate. Done: `lr`."""
    momentum: NotNegative = 0.0
    """Decay of the momentum. Done: `momentum`."""
    dampening: float = 0.0
    """Taken off a gradient that joins the momentum. Done: `dampening`."""
    weight_decay: NotNegative = 0.0
    """L2 penalty. Done: `weight_decay`."""
    nesterov: bool = False
    """Nesterov momentum. Done: `nesterov`."""
    fused: bool | None = None
    """torch's fused kernel. Unset: left to torch. Done: `fused`."""


class AdagradParams(Section):
    """Rates that fall with the sum of squares, as `torch.optim.Adagrad`."""

    lr: NotNegative = 0.01
    """Learning rate. Done: `lr`."""
    lr_decay: NotNegative = 0.0
    """Decay of the learning rate. Done: `lr_decay`."""
    weight_decay: NotNegative = 0.0
    """L2 penalty. Done: `weight_decay`."""
    initial_accumulator_value: NotNegative = 0.0
    """The first sum. Done: `initial_accumulator_value`."""
    eps: NotNegative = 1e-10
    """Added to the root. Done: `eps`."""


class MuonParams(Section):
    """`torch.optim.Muon` for the matrices inside a model, AdamW for all else."""

    lr: NotNegative | None = None
    """Learning rate of both. Unset: 0.02 for matrices, 0.0003 for all else. Done:
    `lr`."""
    muon_lr: NotNegative | None = None
    """That of matrices. Unset: lr. Done: `lr` of Muon's groups."""
    adam_lr: NotNegative | None = None
    """That of all else. Unset: lr. Done: `lr` of AdamW's groups."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay of both. Done: `weight_decay`."""
    momentum: Share = 0.95
    """Decay of the momentum of matrices. Done: `momentum`."""
    nesterov: bool = True
    """Nesterov momentum. Done: `nesterov`."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315)
    """Of a Newton-Schulz iteration. Done: `ns_coefficients`."""
    ns_steps: Annotated[int, "iterations", Ge(1), Le(99)] = 5
    """Newton-Schulz iterations. Done: `ns_steps`."""
    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "original"
    """How the rate follows a matrix's shape. Done: `adjust_lr_fn`."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """Of AdamW, for all else. Done: `betas`."""
    eps: NotNegative = 1e-10
    """Of AdamW too. Done: `eps`."""

    def halves(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of Muon's groups, and those of AdamW's."""
        muon = ("momentum", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
        rates = (self.muon_lr, self.lr, 0.02), (self.adam_lr, self.lr, 3e-4)
        first, second = (next(r for r in rate if r is not None) for rate in rates)
        decay = {"weight_decay": self.weight_decay}
        return (
            {"lr": first, **decay, **{name: getattr(self, name) for name in muon}},
            {"lr": second, **decay, "betas": self.betas, "eps": self.eps},
        )


OPTIMIZERS: dict[str, type[Section]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "SGD": SGDParams,
    "Adagrad": AdagradParams,
    "Muon": MuonParams,
    "FusedAdam": KernelAdamParams,
    "CPUAdam": KernelAdamParams,
    "DeepSpeedCPUAdam": KernelAdamParams,
}


class Optimizer(Section):
    """How parameters are updated, unless `initialize` is given that."""

    variants: ClassVar[dict[str, type[Section]]] = OPTIMIZERS

    type: Literal[
        "Adam", "AdamW", "SGD", "Adagrad", "Muon", "FusedAdam", "CPUAdam",
        "DeepSpeedCPUAdam",
    ]  # fmt: skip
    """Which optimizer. Done: `torch.optim`; FusedAdam is Triton's kernel on a GPU and
    CPUAdam the C++ kernel on the host, both of `minizero.kernels`; Muon leaves matrices
    whole, `minizero.zero.Muon`."""
    params: (
        AdamParams | SGDParams | AdagradParams | MuonParams | KernelAdamParams
    ) = UNSET
    """Its options. Unset: all at their defaults. Done: the arguments of the class."""
    legacy_fusion: bool = False
    """The older way of fusing fp16 updates. No effect: there is one way."""

    def torch_call(self) -> tuple[str, dict[str, Any]]:
        """A name for `kernels.optimizer_class`, and the arguments but the parameters.

        Not of Muon, whose groups need the model: see `MuonParams.halves`.
        """
        options = dict(vars(self.params))
        if isinstance(self.params, KernelAdamParams):
            return self.type, options
        options.pop("fp32_optimizer_states", None)
        if not isinstance(self.params, AdamParams):
            return self.type, options
        own = options.pop("torch_adam")
        decoupled = options.pop("adam_w_mode") or self.type == "AdamW"
        if options["fused"] is None:
            options["fused"] = None if own else True
        if options["weight_decay"] is None:
            # left out, torch's AdamW takes 0.01
            options["weight_decay"] = 0.01 if own and decoupled else 0.0
        return ("AdamW" if decoupled else "Adam"), options


class _Warmup(Section):
    warmup_num_steps: Steps = 1000
    """Length of the warm-up; 1 counts as 2. Done: the schedule."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the rate rises. Done: the schedule."""
    last_batch_iteration: Annotated[int, "steps", Ge(-1)] = -1
    """The step that the schedule goes on after. Done: the schedule."""


class WarmupParams(_Warmup):
    """Rise to a learning rate, and stay there."""

    warmup_min_lr: Rates = 0.0
    """The first learning rate. Done: the schedule."""
    warmup_max_lr: Rates | None = None
    """The last learning rate of the warm-up. Unset: the optimizer's. Done: the
    schedule."""


class WarmupDecayParams(_Warmup):
    """Rise to a learning rate, and fall to 0 in a line."""

    total_num_steps: Steps
    """Length of the run. Done: the schedule."""
    warmup_min_lr: Rates = 0.0
    """The first learning rate. Done: the schedule."""
    warmup_max_lr: Rates = 0.001
    """The highest learning rate. Done: the schedule."""


class WarmupCosineParams(_Warmup):
    """Rise to the optimizer's learning rate, and fall in a cosine."""

    total_num_steps: Steps
    """Length of the run. Done: the schedule."""
    warmup_min_ratio: NotNegative = 0.0
    """The first learning rate, over the optimizer's. Done: the schedule."""
    cos_min_ratio: NotNegative = 0.0001
    """The last learning rate, over the optimizer's. Done: the schedule."""


class OneCycleParams(Section):
    """Rise and fall between two learning rates, then decay."""

    cycle_min_lr: Rates
    """The lowest learning rate of the cycle. Done: the schedule."""
    cycle_max_lr: Rates
    """The highest learning rate. Done: the schedule."""
    decay_lr_rate: NotNegative = 0.0
    """Decay of the rate after the cycle. Done: the schedule."""
    cycle_first_step_size: Steps = 2000
    """Length of the rise. Done: the schedule."""
    cycle_second_step_size: Annotated[int, "steps", Ge(0)] | None = None
    """Length of the fall. Unset: as long as the rise. Done: the schedule."""
    cycle_first_stair_count: Annotated[int, "stairs", Ge(0)] = 0
    """Stairs of the rise; 0 rises at every step. Done: the schedule."""
    cycle_second_stair_count: Annotated[int, "stairs", Ge(0)] | None = None
    """Stairs of the fall. Unset: as many as of the rise. Done: the schedule."""
    decay_step_size: Annotated[int, "steps", Ge(0)] = 0
    """How many steps the decay rates are for; 0 is no decay. Done: the schedule."""
    cycle_momentum: bool = True
    """Move the first beta the other way. Done: the schedule."""
    cycle_min_mom: Shares = 0.8
    """The lowest first beta. Done: the schedule."""
    cycle_max_mom: Shares = 0.9
    """The highest first beta. Done: the schedule."""
    decay_mom_rate: float = 0.0
    """Growth of the beta after the cycle. Done: the schedule."""
    last_batch_iteration: Annotated[int, "steps", Ge(-1)] = -1
    """The step that the schedule goes on after. Done: the schedule."""


class LRRangeTestParams(Section):
    """Rise without end, to see at which learning rate training breaks."""

    lr_range_test_min_lr: Rates = 1e-3
    """The first learning rate. Done: the schedule."""
    lr_range_test_step_size: Steps = 2000
    """How many steps the rise by the step rate takes. Done: the schedule."""
    lr_range_test_step_rate: float = 1.0
    """Rise in so many steps, over the first learning rate. Done: the schedule."""
    lr_range_test_staircase: bool = False
    """Rise once in so many steps, not at every step. Done: the schedule."""
    last_batch_iteration: Annotated[int, "steps", Ge(-1)] = -1
    """The step that the schedule goes on after. Done: the schedule."""


SCHEDULERS: dict[str, type[Section]] = {
    "WarmupLR": WarmupParams,
    "WarmupDecayLR": WarmupDecayParams,
    "WarmupCosineLR": WarmupCosineParams,
    "OneCycle": OneCycleParams,
    "LRRangeTest": LRRangeTestParams,
}


class Scheduler(Section):
    """How the learning rate moves, unless `initialize` is given that."""

    variants: ClassVar[dict[str, type[Section]]] = SCHEDULERS

    type: Literal[
        "WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest"
    ]
    """Which schedule. Done: a schedule of the engine."""
    params: (
        WarmupParams
        | WarmupDecayParams
        | WarmupCosineParams
        | OneCycleParams
        | LRRangeTestParams
    ) = UNSET
    """Its options. Unset: all at their defaults. Done: the arguments of the
    schedule."""


class FP16(Section):
    """fp16 parameters and gradients, with a loss scale."""

    enabled: bool = False
    """Compute in fp16. Done: `parameters` of `MixedPrecision`."""
    loss_scale: NotNegative = 0.0
    """A fixed loss scale; 0 adapts it to the gradients. Done: `LossScale`, and for 0
    `DynamicLossScale`."""
    initial_scale_power: Annotated[int, Ge(0), Le(127)] = 16
    """The adapted scale starts at 2 to this power. Done: `initial_scale_power` of
    `DynamicLossScale`."""
    loss_scale_window: Steps = 1000
    """Double the scale after so many steps without an overflow. Done:
    `loss_scale_window` of `DynamicLossScale`."""
    hysteresis: Annotated[int, "overflows", Ge(1)] = 2
    """Halve the scale at this overflow, not before. Done: `hysteresis` of
    `DynamicLossScale`."""
    consecutive_hysteresis: bool = False
    """Count overflows anew after each step without one. Done: `consecutive_hysteresis`
    of `DynamicLossScale`."""
    min_loss_scale: Annotated[int, Ge(1)] = 1
    """The adapted scale is never smaller. Done: `min_loss_scale` of
    `DynamicLossScale`."""
    auto_cast: Annotated[bool, Anyway(True)] = False
    """Cast the inputs of the model to fp16. No effect: floating-point inputs are always
    cast."""


class BF16(Section):
    """bf16 parameters and gradients, without a loss scale."""

    enabled: bool = False
    """Compute in bf16. Done: `parameters` of `MixedPrecision`."""
    check_grad_overflow: bool = True
    """Skip a step whose gradients are not finite. Done: `LossScale(1)`, and for false
    no test."""
    immediate_grad_update: Annotated[bool, Anyway(True)] = False
    """Add a gradient to its buffer at once. No effect: gradients are made in their
    buffer."""


class DataTypes(Section):
    """Dtypes of what is neither fp16 nor bf16 by these sections."""

    grad_accum_dtype: Dtype | None = None
    """In which gradients are added up over micro-batches. Unset: the parameters'. Done:
    `reduce` of `MixedPrecision`."""
    param_dtype: Dtype | None = None
    """Of the parameters; it must say what fp16 or bf16 say. Unset: by fp16 and bf16.
    Done: a check."""
    buffer_dtype: Dtype | None = None
    """Of the model's floating-point buffers. Unset: the parameters' where their module
    has parameters of its own (a batch norm), and elsewhere as they come. Done:
    `buffers` of `MixedPrecision`."""


class ActivationCheckpointing(Section):
    """How checkpointed modules keep what they save; it wraps none itself."""

    cpu_checkpointing: bool = False
    """Keep it in host memory until backward. Done: `Offloaded`, as `store` of
    `Recompute`."""
    partition_activations: bool = False
    """Keep a part of it on each tensor-parallel rank. No effect: ranks of data
    parallelism hold different activations; see cpu_checkpointing."""
    number_checkpoints: Annotated[int, "checkpoints", Ge(1)] | None = None
    """How many checkpoints a contiguous buffer has room for. Unset: none. No effect:
    there is no such buffer."""
    contiguous_memory_optimization: bool = False
    """Keep checkpoints in one contiguous buffer. No effect: PyTorch's allocator keeps
    them."""
    synchronize_checkpoint_boundary: bool = False
    """Let the device finish at each checkpoint. No effect: nothing needs it;
    wall_clock_breakdown synchronizes."""
    profile: bool = False
    """Time each checkpoint. No effect: the tracker's trace has forward and backward of
    each unit."""


class Monitor(Section):
    """Writes loss, learning rate and loss scale of each step, on rank 0."""

    enabled: bool = False
    """Write. Done: `engine.monitor`."""
    output_path: str = ""
    """The folder. Done: `engine.monitor`."""
    job_name: str = "DeepSpeedJobName"
    """The folder in that. Done: `engine.monitor`."""


class FlopsProfiler(Section):
    """Counts the FLOPs of one forward, module by module, on rank 0."""

    enabled: bool = False
    """Count. Done: `torch.utils.flop_counter`."""
    profile_step: Steps = 1
    """The step whose first forward is counted. Done: the engine."""
    module_depth: Annotated[int, "levels", Ge(-1)] = -1
    """How deep in modules the table goes; -1: all. Done: the table's depth."""
    output_file: str | None = None
    """The file of the table. Unset: standard output. Done: the engine."""
    top_modules: Annotated[int, "modules", Ge(1)] = 1
    """How many modules are singled out. No effect: the table has all of them."""
    detailed: bool = True
    """Print each module's share too. No effect: the table has all of them."""
    recompute_fwd_factor: NotNegative = 0.0
    """Part of the forward that backward computes again. No effect: only the forward is
    counted."""


class Checkpoint(Section):
    """How checkpoints are saved; minizero has a format of its own."""

    tag_validation: Annotated[Literal["Ignore", "Warn", "Fail"], Anyway("Fail")] = (
        "Warn"
    )
    """What happens when ranks save under different tags. No effect: different tags are
    always an error."""
    load_universal: Annotated[bool, Anyway(True)] = False
    """Load what was converted for another number of ranks. No effect: every checkpoint
    loads on any number of ranks."""
    checkpoint_serialization: Annotated[bool, Anyway(False)] = True
    """Pickle tensors as such. No effect: nothing is pickled: tensors are in safetensors
    files."""
