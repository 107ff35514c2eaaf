"""The public surface: every name that a script or a chapter may count on.

DeepSpeed's names are in `minizero.deepspeed.NAMES`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest
import torch

import minizero
import minizero.deepspeed

NAMES = {
    "minizero": """
        Delayed Engine NVMe Offload Overlap Placement Plan Tracker add_config_arguments
        checkpoint comm consolidate default_ranks estimate
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
    "minizero.deepspeed.utils": """
        RepeatingLoader safe_get_full_fp32_param safe_get_full_grad
        safe_get_full_optimizer_state safe_set_full_fp32_param safe_set_full_grad
        safe_set_full_optimizer_state
    """,
    "minizero.checkpoint": "CheckpointError Folder Loaded finish load save",
    "minizero.deepspeed.checkpointing": "checkpoint configure",
}


ENGINE = """
    backward bfloat16_enabled destroy empty_partition_cache eval forward fp16_enabled
    get_batch_info get_global_grad_norm get_lr get_mom gradient_accumulation_steps
    gradient_clipping is_compiled is_gradient_accumulation_boundary load_checkpoint
    load_state_dict module_state_dict no_sync save_16bit_model save_checkpoint
    set_gradient_accumulation_boundary skipped_steps state_dict step train
    train_batch_size train_micro_batch_size_per_gpu was_step_applied zero_grad
    zero_gather_16bit_weights_on_model_save zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights
    zero_optimization_stage
"""


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    """By attribute, which `from module import name` is."""
    found = import_module(module)
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


def test_names_of_the_engine() -> None:
    """Some are looked up in the config, so an engine is asked."""
    model = torch.nn.Linear(2, 2)
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}}
    engine, *_ = minizero.initialize(model=model, config=config)
    assert not [n for n in ENGINE.split() if not hasattr(engine, n)]


def test_modules_are_imported_by_their_short_names() -> None:
    """In a program that has imported nothing else, and the engine only then."""
    modules = ", ".join(module for module in NAMES if module != "minizero")
    code = (
        "import sys, minizero\n"
        "late = {f'minizero.{m}' for m in ('config', 'engine', 'offload', 'lab')}\n"
        f"assert not late & {{*sys.modules}}\nimport {modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scripts_that_join_their_ranks_themselves_are_prepared() -> None:
    env = {k: v for k, v in os.environ.items() if k != "THP_MEM_ALLOC_ENABLE"}
    code = """import os; os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
import minizero; assert os.sched_getscheduler(0) == os.SCHED_BATCH
assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1" """
    env |= {"WORLD_SIZE": "2"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
