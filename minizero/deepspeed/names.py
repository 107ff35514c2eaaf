"""Which of DeepSpeed's names there are, what each is, and why others are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import accumulate, product
from types import ModuleType
from typing import Any

HERE = __name__.rpartition(".")[0]

_parts = product(
    ("get", "set"), ("full", "local"), ("fp32_param", "grad", "optimizer_state")
)
_SAFE = " ".join(f"safe_{do}_{part}_{what}" for do, part, what in _parts)
_LEAVES = {
    ".sharding": "set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules get_z3_leaf_modules "
    "z3_leaf_module"
}
_ERROR = {"..config": "DeepSpeedConfigError=ConfigError"}
_LOADER = {"..engine.data": "DeepSpeedDataLoader=Loader"}
_LOGS = {".logs": "logger log_dist"}
_OPTIMIZER = "..engine.optimizer"
_ZERO = {
    ".sharding": "GatheredParameters Init",
    "..zero.absent": "ZeroParamStatus",
}

# By module of DeepSpeed's: where its names are. `theirs=ours` where they differ; "*" is
# whatever else the other module has.
NAMES: dict[str, dict[str, str]] = {
    "": {
        "..engine": "initialize Engine DeepSpeedEngine=Engine",
        ".arguments": "add_config_arguments",
        ".devices": "get_accelerator OnDevice",
        ".processes": "init_distributed",
        ".unsharded": "PipelineModule",
        **_ERROR,
        **_LOADER,
        **_LOGS,
    },
    "accelerator": {".devices": "get_accelerator"},
    "comm": {
        ".processes": "init_distributed get_local_rank get_rank get_world_size "
        "get_world_group",
        "torch.distributed": "*",
    },
    "compression.helper": {".unsharded": "recursive_getattr recursive_setattr"},
    "moe.utils": {".unsharded": "split_params_into_different_moe_groups_for_optimizer"},
    "ops.adagrad": {".optimizers": "DeepSpeedCPUAdagrad"},
    "ops.adam": {".optimizers": "DeepSpeedCPUAdam FusedAdam"},
    "pipe": {".unsharded": "PipelineModule"},
    "runtime.activation_checkpointing.checkpointing": {".checkpointing": "*"},
    "runtime.base_optimizer": {
        _OPTIMIZER: "DeepSpeedOptimizer=EngineOptimizer ZeROOptimizer=EngineOptimizer"
    },
    "runtime.config": {
        ".unsharded": "LAMB_OPTIMIZER ONEBIT_LAMB_OPTIMIZER",
        **_ERROR,
    },
    "runtime.dataloader": {".parameters": "RepeatingLoader", **_LOADER},
    "runtime.engine": {"..engine": "DeepSpeedEngine=Engine"},
    "runtime.lr_schedules": {
        "..engine.lr_schedules": "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle "
        "LRRangeTest"
    },
    "runtime.utils": {"..memory": "see_memory_usage", ".logs": "set_random_seed"},
    "runtime.zero": _ZERO,
    "runtime.zero.offload_config": {
        ".sharding": "OffloadDeviceEnum OffloadStateTypeEnum"
    },
    "runtime.zero.stage3": {
        _OPTIMIZER: "DeepSpeedZeroOptimizer_Stage3=EngineOptimizer"
    },
    "runtime.zero.stage_1_and_2": {
        _OPTIMIZER: "DeepSpeedZeroOptimizer=EngineOptimizer"
    },
    "runtime.zero.partition_parameters": _ZERO,
    "utils": {
        ".parameters": f"RepeatingLoader {_SAFE} safe_update_full_grad_vectorized",
        ".devices": "OnDevice",
        **_LEAVES,
        **_LOGS,
    },
    "utils.groups": {
        ".processes": "get_data_parallel_group=get_world_group "
        "get_data_parallel_rank=get_rank get_data_parallel_world_size=get_world_size "
        "get_model_parallel_rank=zero get_model_parallel_world_size=one "
        "get_tensor_model_parallel_rank=zero get_tensor_model_parallel_world_size=one"
    },
    "utils.logging": _LOGS,
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": {
        ".weights": "get_fp32_state_dict_from_zero_checkpoint "
        "convert_zero_checkpoint_to_fp32_state_dict "
        "load_state_dict_from_zero_checkpoint"
    },
    "zero": _ZERO,
}
MODULES = {
    path for name in NAMES for path in accumulate(name.split("."), "{}.{}".format)
}

_KERNELS = "there are no kernels but Adam's and LayerNorm's; use torch's own"
_INFERENCE = "it trains, and does not serve; call engine.module, or load the weights"
_RANKS = "each rank computes the whole model; there is no parallelism but of data"
# What is not done here: by the beginning of a name, the longest that fits.
WHY = {
    "": "it has the names that training with ZeRO needs; leave this one out",
    "autotuning": "the memory model answers that: minizero.estimate",
    "compile": "call engine.compile()",
    "compression": "nothing is pruned or quantized; do that to the model itself",
    "elasticity": "every checkpoint loads on any number of ranks",
    "DeepSpeedConfig": "minizero.config.read makes a Config of it",
    "inference": _INFERENCE,
    "init_inference": _INFERENCE,
    "io": "save with engine.save_checkpoint, offload with device nvme",
    "launcher": "start the ranks with torchrun",
    "module_inject": "layers stay as the model has them",
    "moe": f"experts lie on one rank each there; {_RANKS}",
    "monitor": "engine.monitor writes what csv_monitor and tensorboard ask for",
    "ops": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DeepSpeedTransformerConfig": _KERNELS,
    "pipe": f"layers lie on several ranks there; {_RANKS}",
    "runtime.pipe": f"layers lie on several ranks there; {_RANKS}",
    "runtime.data_pipeline": "choose the batches in the data loader",
    "runtime.domino": _RANKS,
    "sequence": f"a sequence lies on several ranks there; {_RANKS}",
    "tp_model_init": _RANKS,
    "zero.MiCS_Init": "parameters are sharded over all ranks; use zero.Init",
    "zero.TiledLinear": "a layer is gathered whole; use nn.Linear",
    "zero.register_external_parameter": "use the parameter in its unit's forward, or "
    "hold it with zero.GatheredParameters",
}


def why_not(name: str) -> str:
    """What is said of a name that is not here."""
    name = name.replace("runtime.zero", "zero")
    longest = max(
        (k for k in WHY if f"{name}.".startswith(f"{k}." if k else k)), key=len
    )
    return f"minizero does not do deepspeed.{name}: {WHY[longest]}"


def lookup(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module of DeepSpeed's: names are imported when asked for."""
    targets: dict[str, tuple[str, str]] = {}
    others = []
    for where, names in NAMES.get(module, {}).items():
        for name in names.split():
            theirs, _, ours = name.partition("=")
            targets[theirs] = where, ours or theirs
            others += [where] if name == "*" else []

    def find(name: str) -> Any:
        if name in targets:
            where, ours = targets[name]
            return getattr(import_module(where, HERE), ours)
        path = f"{module}.{name}".lstrip(".")
        if path in MODULES or path == "checkpointing":
            return import_module(f"{HERE}.{path}")
        for where in () if name.startswith("__") else others:
            found = getattr(import_module(where, HERE), name, None)
            if found is not None:
                return found
        raise AttributeError(why_not(path))

    return find


class _Finder(MetaPathFinder, Loader):
    """Makes the modules of `MODULES`; says of any other why it is not there."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not name.startswith(f"{HERE}."):
            return None
        short = name.removeprefix(f"{HERE}.")
        if short in MODULES:
            return ModuleSpec(name, self, is_package=True)
        raise ModuleNotFoundError(why_not(short))

    def exec_module(self, module: ModuleType) -> None:
        short = module.__name__.removeprefix(f"{HERE}.")
        module.__doc__ = f"DeepSpeed's `deepspeed.{short}`: see `{__name__}`."
        module.__getattr__ = lookup(short)  # type: ignore[method-assign]


def install() -> None:
    """From now on they can be imported."""
    sys.meta_path.append(_Finder())
