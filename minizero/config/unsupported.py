"""DeepSpeed's keys that minizero does not do, and what to use instead."""

from __future__ import annotations

from typing import Any, NamedTuple

ON = {"enabled": True}


class Refused(NamedTuple):
    """`off`: the value that asks for nothing, and so is accepted. `ON` is for
    sections, which are off while their `enabled` is not true."""

    off: Any
    instead: str

    def asks(self, value: Any) -> bool:
        """Whether `value` asks for what is refused."""
        if self.off is ON and isinstance(value, dict):
            return value.get("enabled", False) is not False
        return value is not None and value != self.off


_MIXED = "use fp16 or bf16"
_FP32 = 'use "communication_data_type": "fp32", whose sums do not overflow'
_LOG = "use csv_monitor or tensorboard"
_DATA = "choose the batches in the data loader"
_MASTERS = "master weights are fp32, as exact resuming needs"
_COMPILE = "call engine.compile()"
_BACKGROUND = "for a save beside training call save_checkpoint(..., background=BYTES)"
_PARALLEL = "minizero is data-parallel; remove it"

SECTIONS = {
    "amp": Refused(ON, _MIXED),
    "torch_autocast": Refused(ON, _MIXED),
    "autotuning": Refused(ON, "use `python -m minizero plan`"),
    "elasticity": Refused(
        ON, "every checkpoint resumes on any number of ranks; remove it"
    ),
    "comms_logger": Refused(ON, "use `minizero.comm.ledger()`"),
    "wandb": Refused(ON, _LOG),
    "comet": Refused(ON, _LOG),
    "data_efficiency": Refused(ON, _DATA),
    "curriculum_learning": Refused(ON, _DATA),
    "quantize_training": Refused(ON, "quantize the model itself"),
    "compression_training": Refused({}, "compress the model itself"),
    "weight_quantization": Refused({}, "quantize the model itself"),
    "eigenvalue": Refused(ON, "it serves quantize_training; remove it"),
    "progressive_layer_drop": Refused(ON, "drop layers in the model itself"),
    "sparse_attention": Refused({}, "use an attention that is sparse"),
    "pipeline": Refused({}, _PARALLEL),
    "tensor_parallel": Refused({}, _PARALLEL),
    "expert_parallel": Refused(ON, _PARALLEL),
    "hybrid_engine": Refused(ON, "generate with engine.module"),
    "compile": Refused({}, _COMPILE),
    "nebula": Refused(ON, _BACKGROUND),
    "datastates_ckpt": Refused({}, _BACKGROUND),
    "timers": Refused({}, "use wall_clock_breakdown"),
}

TOP = {
    "managed_gradient_accumulation": Refused(
        True, "the engine counts micro-batches; use gradient_accumulation_steps"
    ),
    "prescale_gradients": Refused(False, _FP32),
    "gradient_predivide_factor": Refused(1.0, _FP32),
    "gradient_allreduce_op": Refused(
        "mean", "multiply the loss by the number of ranks"
    ),
    "sparse_gradients": Refused(
        False, "gradients are dense; make embeddings with sparse=False"
    ),
    "disable_allgather": Refused(
        False, "updated parameters are always gathered; remove it"
    ),
    "graph_harvesting": Refused(False, _COMPILE),
    "sequence_parallel_size": Refused(1, _PARALLEL),
    "seq_parallel_communication_data_type": Refused("fp32", _PARALLEL),
    "use_data_before_expert_parallelism": Refused(False, _PARALLEL),
}

ZERO = {
    "legacy_stage1": Refused(False, "there is one stage 1; remove it"),
    "mics_hierarchical_params_gather": Refused(
        False, "a unit is gathered in one collective of its group"
    ),
    "zero_quantized_nontrainable_weights": Refused(
        False, "frozen weights are quantized on their way, by zero_quantized_weights"
    ),
    "zeropp_loco_param": Refused(
        None, "quantized gradients are sent without what was lost before; leave it out"
    ),
    "zenflow": Refused(None, 'use "offload_optimizer"'),
    "save_muon_momentum_buffer_in_memory": Refused(
        False, "the momentum rests where the plan places optimizer state; remove it"
    ),
    "offload_optimizer.ratio": Refused(
        1.0, "all of the optimizer state is offloaded; leave it at 1"
    ),
    "offload_optimizer.super_offload": Refused(False, "use offload_optimizer as it is"),
}

INNER = {
    "fp16.fp16_master_weights_and_grads": Refused(False, _MASTERS),
    "bf16.bf16_master_weights_and_grads": Refused(False, _MASTERS),
    "bf16.bf16_optimizer_states": Refused(False, _MASTERS),
    "data_types.keep_in_fp32_modules": Refused(
        "auto", "see buffer_dtype for what is cast"
    ),
    "aio.use_gds": Refused(False, "files are read into host memory"),
    "aio.thread_count": Refused(1, "use intra_op_parallelism"),
    "checkpoint.use_node_local_storage": Refused(
        False, "save to a folder that all ranks see"
    ),
    "checkpoint.parallel_write": Refused(
        {}, "each rank writes its own file; remove it"
    ),
    "checkpoint.writer": Refused({}, _BACKGROUND),
    "optimizer.params.bias_correction": Refused(
        True, "make the optimizer yourself and pass it to initialize"
    ),
    "optimizer.params.amsgrad": Refused(
        False, "make the optimizer yourself and pass it to initialize"
    ),
    "optimizer.params.ns_method": Refused(
        "standard", "torch.optim.Muon iterates on the matrix itself; remove it"
    ),
    "optimizer.params.per_head_muon": Refused(
        False, "a matrix is made orthogonal as a whole; remove it"
    ),
    "optimizer.params.set_grad_none": Refused(
        True, "gradients are views of a buffer; remove it"
    ),
}

REFUSED: dict[str, Refused] = {
    **TOP,
    **SECTIONS,
    **{f"zero_optimization.{name}": what for name, what in ZERO.items()},
    **INNER,
}

_ZERO = "zero_optimization"
_SAVES = f"{_ZERO}.stage3_gather_{{}}_weights_on_model_save"
# Old spellings, today's, and what the old one means if that is not its own value.
OLD: dict[str, tuple[str, Any]] = {
    "bfloat16": ("bf16", None),
    "optimizer.params.max_grad_norm": ("gradient_clipping", None),
    f"{_ZERO}.cpu_offload": (f"{_ZERO}.offload_optimizer", {"device": "cpu"}),
    f"{_ZERO}.cpu_offload_param": (f"{_ZERO}.offload_param", {"device": "cpu"}),
    _SAVES.format("fp16"): (_SAVES.format("16bit"), None),
}

_SHAPES = "its update needs the shapes of parameters, and shards have none; use AdamW"
_SPARSE = "nothing is compressed on its way; use AdamW"
_MUP = "make it with the package mup, and pass it to minizero.initialize"

# What to use instead of some values, in small letters; "" stands for any other.
ADVICE = {
    "optimizer.type": {
        "": "pass another element-wise optimizer to minizero.initialize",
        **dict.fromkeys(("lamb", "fusedlamb", "onebitlamb"), _SHAPES),
        **dict.fromkeys(("onebitadam", "zerooneadam"), _SPARSE),
        **dict.fromkeys(("muadam", "muadamw", "musgd"), _MUP),
    },
    "scheduler.type": {
        "": "pass another scheduler to minizero.initialize as lr_scheduler="
    },
    "fp16.loss_scale": {"dynamic": "0 adapts the scale"},
}
