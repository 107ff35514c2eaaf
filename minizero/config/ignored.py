"""DeepSpeed's keys that have no effect in minizero, and those that are refused.

A row has a reason, which ends the warning or the error; a section ("" is the top); and
its keys, each with the value that is accepted in silence because it asks for nothing:
mostly DeepSpeed's default. ANY accepts every value in silence, None accepts no value.
"""

from __future__ import annotations

from typing import Any

ANY: Any = object()
Rows = list[tuple[str, str, dict[str, Any]]]
ZERO = "zero_optimization"
STATES, PARAM = f"{ZERO}.offload_optimizer", f"{ZERO}.offload_param"
# fmt: off
NO_EFFECT: Rows = [
    ("a collective moves whole units or buckets; choose their size", ZERO, {
        "allgather_bucket_size": 500_000_000, "sub_group_size": 1_000_000_000,
        "contiguous_gradients": True, "reduce_scatter": True, "leaf_module": None,
        "allgather_partitions": True, "use_multi_rank_bucket_allreduce": True,
        "round_robin_gradients": ANY, "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False, "parameter_alignment": False,
        "stage3_allgather_sequential": False}),
    ("python -m minizero dryrun reads it", "", {"minizero_plan": ANY}),
    ("minizero always does it in the same way", ZERO, {
        "ignore_unused_parameters": True, "cpu_offload_use_pin_memory": None,
        "memory_efficient_linear": ANY, "override_module_apply": True,
        "log_trace_cache_warnings": False, "enable_sanity_checks": False,
        "load_from_fp32_weights": True, "elastic_checkpoint": ANY,
        "pipeline_loading_checkpoint": False, "stage3_max_reuse_distance": ANY,
        "stage3_model_persistence_threshold": ANY}),
    ("host memory is page-locked, and bounded by the buffers alone", PARAM, {
        "pin_memory": True, "max_in_cpu": 1_000_000_000}),
    ("the update always reads, computes and writes at the same time", STATES, {
        "pin_memory": True, "pipeline_read": ANY, "pipeline_write": ANY,
        "fast_init": False, "cpuadam_cores_perc": 0.8}),
    ("queue_depth alone bounds the requests in flight", "aio", {
        "intra_op_parallelism": 1, "single_submit": False, "overlap_events": True}),
    ("states are fp32", "optimizer.params", {"fp32_optimizer_states": True}),
    ("inputs are always cast", "fp16", {"auto_cast": ANY}),
    ("fp16.enabled or bf16.enabled sets it", "data_types", {"param_dtype": None}),
    ("gradients are written into their buffer", "bf16", {"immediate_grad_update": ANY}),
    ("each rank keeps the inputs of its own modules", "activation_checkpointing", {
        "partition_activations": False, "number_checkpoints": None, "profile": False,
        "contiguous_memory_optimization": False,
        "synchronize_checkpoint_boundary": False}),
    ("use torch.utils.flop_counter", "", {"flops_profiler": None}),
    ("checkpoints load on any ranks, and element-wise optimizers are sharded", "", {
        "checkpoint": None, "zero_allow_untested_optimizer": ANY,
        "zero_force_ds_cpu_optimizer": ANY}),
    ("call minizero.see_memory_usage, gc.disable or logging in the script", "", {
        "memory_breakdown": False, "dump_state": False, "log_level": None,
        "disable_python_gc": False, "vocabulary_size": None}),
    ("write the loss and engine.get_lr() in the script", "", {
        "tensorboard": None, "csv_monitor": None, "wandb": None, "comet": None}),
    ("use minizero.trace or minizero.comm.ledger", "", {
        "wall_clock_breakdown": False, "comms_logger": None}),
]

REFUSED: Rows = [
    ("write bf16", "", {"bfloat16": None}),
    ('write "offload_optimizer" or "offload_param": {"device": "cpu"}', ZERO, {
        "cpu_offload": False, "cpu_offload_param": False}),
    ("write stage3_gather_16bit_weights_on_model_save", ZERO, {
        "stage3_gather_fp16_weights_on_model_save": False}),
    ("write gradient_clipping, at the top", "optimizer.params", {"max_grad_norm": 0}),
    ('gradients are averaged; use "communication_data_type": "fp32"', "", {
        "prescale_gradients": False, "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean", "sparse_gradients": False}),
    ("do it in the script, or leave it out", "", {
        **dict.fromkeys((
            "amp", "torch_autocast", "pipeline", "tensor_parallel", "expert_parallel",
            "data_efficiency", "curriculum_learning", "quantize_training", "eigenvalue",
            "compression_training", "weight_quantization", "progressive_layer_drop",
            "sparse_attention", "hybrid_engine", "autotuning", "compile", "elasticity",
            "nebula", "datastates_ckpt", "timers")),
        "sequence_parallel_size": 1, "seq_parallel_communication_data_type": "fp32",
        "use_data_before_expert_parallelism": False, "graph_harvesting": False,
        "managed_gradient_accumulation": True, "disable_allgather": False}),
    ("leave it out", ZERO, {
        "legacy_stage1": False, "mics_hierarchical_params_gather": False,
        "zero_quantized_nontrainable_weights": False, "zeropp_loco_param": None,
        "save_muon_momentum_buffer_in_memory": False, "zenflow": None}),
    ("leave it out", "aio", {"use_gds": False, "thread_count": 1}),
    ("leave it out", "optimizer", {"legacy_fusion": False}),
    ("all of the optimizer state is offloaded; leave it out", STATES, {
        "ratio": 1.0, "super_offload": False}),
    *[("master weights are fp32, for exact resuming; leave it out", section, {
        f"{section}_master_weights_and_grads": False, "bf16_optimizer_states": False})
      for section in ("fp16", "bf16")],
    ("use buffer_dtype", "data_types", {"keep_in_fp32_modules": "auto"}),
    ("construct the optimizer and pass it to initialize", "optimizer.params", {
        "bias_correction": True, "set_grad_none": True, "ns_method": "standard",
        "per_head_muon": False}),
]
# fmt: on


IGNORED = {
    f"{section}.{key}".lstrip("."): (reason, default, rows is REFUSED)
    for rows in (NO_EFFECT, REFUSED)
    for reason, section, keys in rows
    for key, default in keys.items()
}
"""By dotted name: the reason, the value accepted in silence, whether it is refused."""
