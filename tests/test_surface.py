"""The public surface: every name that a script or a chapter may count on.

Each is told of in a chapter or on a page; a name or an argument that goes is missed.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch

import minizero
import minizero.deepspeed

NAMES = {
    "minizero": """
        Delayed Engine NVMe Offload Overlap Placement Plan Tracker add_config_arguments
        checkpoint checkpointing comm consolidate default_ranks estimate
        estimate_activations init_distributed initialize launch load_ipython_extension
        parallelize see_memory_usage trace utils zero
    """,
    "minizero.comm": """
        ALGORITHMS Work algorithm all_gather all_reduce barrier broadcast
        current_algorithm get_rank get_world_size ledger phase reduce_scatter
    """,
    "minizero.zero": """
        Action DataParallel Flat GatheredParameters Init Muon Precision Schedule Storage
        Unit ZeRO1 ZeRO2 ZeRO3 find_units parallelize
    """,
    "minizero.utils": """
        RepeatingLoader safe_get_full_fp32_param safe_get_full_grad
        safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad
        safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad
        safe_set_local_optimizer_state safe_update_full_grad_vectorized
    """,
    "minizero.checkpoint": "CheckpointError Folder Loaded Saving finish load save",
    "minizero.checkpointing": "checkpoint configure is_configured reset",
}

# What public scripts import from DeepSpeed.
THEIRS = {
    "": """
        DeepSpeedEngine OnDevice accelerator add_config_arguments
        checkpointing comm get_accelerator init_distributed initialize ops runtime utils
        zero
    """,
    "accelerator": "get_accelerator",
    "checkpointing": "checkpoint configure is_configured reset",
    "comm": """
        ReduceOp all_gather all_reduce barrier broadcast get_local_rank get_rank
        get_world_group get_world_size init_distributed is_initialized new_group
        reduce_scatter_tensor
    """,
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "runtime.lr_schedules": """
        LRRangeTest OneCycle WarmupCosineLR WarmupDecayLR WarmupLR
    """,
    "runtime.zero": "GatheredParameters Init",
    "runtime.zero.partition_parameters": "GatheredParameters Init ZeroParamStatus",
    "utils": """
        OnDevice RepeatingLoader groups log_dist logger
        safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
        safe_get_local_fp32_param safe_get_local_grad safe_get_local_optimizer_state
        safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state
        safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
        zero_to_fp32
    """,
    "utils.groups": """
        get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size
        get_model_parallel_rank get_model_parallel_world_size
    """,
    "utils.zero_to_fp32": """
        convert_zero_checkpoint_to_fp32_state_dict
        get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint
    """,
    "zero": "GatheredParameters Init",
}

ENGINE = """
    backward bfloat16_enabled data_parallel_group deepspeed_io destroy
    empty_partition_cache eval finish_checkpoint forward fp16_enabled get_batch_info
    get_global_grad_norm get_lr get_mom gradient_accumulation_steps gradient_clipping
    is_compiled is_gradient_accumulation_boundary load_checkpoint
    load_module_state_dict load_state_dict module_state_dict no_sync optimizer_name
    save_16bit_model save_checkpoint set_gradient_accumulation_boundary
    set_train_batch_size skipped_steps state_dict step train
    train_batch_size train_micro_batch_size_per_gpu was_step_applied zero_grad
    zero_gather_16bit_weights_on_model_save zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights
    zero_optimization_stage
"""

ARGUMENTS = {
    "launch": "fn nprocs args backend timeout kwargs",
    "initialize": """
        args model optimizer model_parameters training_data lr_scheduler
        distributed_port mpu dist_init_required collate_fn config mesh_param
        config_params units
    """,
    "init_distributed": "backend timeout dist_backend",
    "add_config_arguments": "parser",
    "estimate": """
        n_params world_size stage precision optimizer offload_optimizer offload_param
    """,
    "estimate_activations": """
        layers hidden heads sequence micro_batch checkpointing attention
    """,
    "consolidate": "folder tag",
    "see_memory_usage": "message force",
    "trace": "engine path tracker",
    "parallelize": "model optimizer plan",
    "Overlap": "prefetch_bucket_size max_live_parameters param_persistence_threshold",
    "Offload": "plan",
    "NVMe": "plan",
    "Delayed": "plan start",
    "Tracker": "model optimizer",
    "zero.Init": "config storage enabled",
    "zero.GatheredParameters": "params modifier_rank",
    "comm.all_gather": "out inp async_op",
    "comm.all_reduce": "tensor async_op",
    "comm.reduce_scatter": "out inp async_op",
    "comm.broadcast": "tensor src async_op",
    "checkpoint.save": "net folder tag extra keep background latest",
    "checkpoint.load": "net folder tag strict optimizer check",
    "Engine.save_checkpoint": """
        save_dir tag client_state save_latest exclude_frozen_parameters keep background
    """,
    "Engine.load_checkpoint": """
        load_dir tag load_module_strict load_optimizer_states
        load_lr_scheduler_states load_module_only
    """,
    "deepspeed.zero.GatheredParameters": "params modifier_rank fwd_module enabled",
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    """By attribute, which `from module import name` is."""
    found = import_module(module)
    missing = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not missing


@pytest.mark.parametrize("module", THEIRS)
def test_names_of_deepspeed(module: str) -> None:
    name = f"minizero.deepspeed.{module}".rstrip(".")
    found = import_module(name)
    missing = [name for name in THEIRS[module].split() if not hasattr(found, name)]
    assert not missing


def test_names_of_the_engine() -> None:
    """Some are looked up in the config, so an engine is asked."""
    model = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = minizero.initialize(model=model, config=config)
    assert not [n for n in ENGINE.split() if not hasattr(engine, n)]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    found: Any = minizero
    for part in name.split("."):
        found = getattr(found, part)
    known = inspect.signature(found).parameters
    assert set(ARGUMENTS[name].split()) <= set(known)


def test_modules_are_imported_by_their_short_names() -> None:
    """In a program that has imported nothing else, and the engine only then."""
    modules = ", ".join(module for module in NAMES if module != "minizero")
    code = (
        "import sys, minizero\n"
        "late = {f'minizero.{m}' for m in ('config', 'engine', 'offload', 'lab')}\n"
        f"assert not late & {{*sys.modules}}\nimport {modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
