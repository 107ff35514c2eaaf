"""DeepSpeed's names: a script's imports say `minizero.deepspeed` for `deepspeed`.

Only the names in `NAMES` are published: what each of DeepSpeed's modules holds here.
`parameters` (a parameter in its shards) and `compat` have what needs code.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.distributed

from ..activations import CHECKPOINT
from ..checkpoint import consolidate
from ..config import ConfigError
from ..engine import Engine, initialize, lr_schedules
from ..engine.data import Loader
from ..engine.optimizer import EngineOptimizer
from ..kernels import FusedAdam
from ..memory import see_memory_usage
from ..ranks import rank, world_size
from . import compat, parameters

__version__ = "0.19.8"  # of DeepSpeed, whose names these are

OBJECTS: dict[str, Any] = {
    **vars(compat), **vars(parameters), **vars(lr_schedules),
    "initialize": initialize, "Engine": Engine, "DeepSpeedEngine": Engine,
    "DeepSpeedDataLoader": Loader, "DeepSpeedConfigError": ConfigError,
    "DeepSpeedOptimizer": EngineOptimizer, "checkpoint": CHECKPOINT,
    "FusedAdam": FusedAdam, "DeepSpeedCPUAdagrad": torch.optim.Adagrad,
    "see_memory_usage": see_memory_usage,
    "get_fp32_state_dict_from_zero_checkpoint": consolidate,
    "get_world_group": lambda: torch.distributed.group.WORLD,
    "get_data_parallel_group": lambda: torch.distributed.group.WORLD,
    "get_data_parallel_rank": rank, "get_data_parallel_world_size": world_size,
    "get_model_parallel_rank": lambda: 0, "get_model_parallel_world_size": lambda: 1,
}  # fmt: skip

_CHECKPOINTING = "checkpoint configure"
_ZERO = "GatheredParameters Init ZeroParamStatus"
_SAFE = " ".join(name for name in vars(parameters) if name.startswith("safe_"))
NAMES = {
    "": "initialize Engine DeepSpeedEngine DeepSpeedDataLoader DeepSpeedConfigError "
    "add_config_arguments get_accelerator init_distributed logger log_dist",
    "accelerator": "get_accelerator",
    "checkpointing": _CHECKPOINTING,
    "comm": "init_distributed get_local_rank get_world_group",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "runtime.base_optimizer": "DeepSpeedOptimizer",
    "runtime.config": "DeepSpeedConfigError",
    "runtime.dataloader": "DeepSpeedDataLoader RepeatingLoader",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest",
    "runtime.utils": "see_memory_usage",
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO,
    "utils": f"{_SAFE} RepeatingLoader logger log_dist",
    "utils.groups": "get_data_parallel_group get_data_parallel_rank "
    "get_data_parallel_world_size get_model_parallel_rank "
    "get_model_parallel_world_size",
    "utils.logging": "logger log_dist",
    "utils.zero_to_fp32": "get_fp32_state_dict_from_zero_checkpoint "
    "convert_zero_checkpoint_to_fp32_state_dict load_state_dict_from_zero_checkpoint",
    "zero": _ZERO,
}


def _install() -> None:
    """Put a module for each of DeepSpeed's into `sys.modules`."""
    # each path, of four parts at most, and its parents: "ops.adam" has "ops"
    every = {".".join(path.split(".")[: i + 1]) for path in NAMES for i in range(4)}
    for path in sorted(every - {""}):  # a parent before its parts
        module = ModuleType(f"{__name__}.{path}", f"DeepSpeed's `deepspeed.{path}`.")
        for name in NAMES.get(path, "").split():
            setattr(module, name, OBJECTS[name])
        sys.modules[module.__name__] = module
        parent, _, name = module.__name__.rpartition(".")
        setattr(sys.modules[parent], name, module)
        if path == "comm":  # what is not DeepSpeed's is torch's
            vars(module)["__getattr__"] = lambda name: getattr(torch.distributed, name)


globals().update({name: OBJECTS[name] for name in NAMES[""].split()})
_install()


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"minizero does not support deepspeed.{name}: it has the names that training "
        "with ZeRO needs; leave this one out"
    )
