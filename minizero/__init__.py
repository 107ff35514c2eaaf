"""ZeRO from scratch: train models whose state is spread over ranks.

Names under `minizero.` are the public surface; the chapters introduce them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import comm, zero
from .memory import (
    Placement,
    Plan,
    Tracker,
    estimate,
    estimate_activations,
    see_memory_usage,
)
from .ranks import default_ranks, init_distributed, launch
from .zero import parallelize

if TYPE_CHECKING:
    from . import checkpoint, scale
    from .checkpoint import consolidate
    from .deepspeed import parameters as utils
    from .deepspeed.compat import add_config_arguments
    from .engine import Engine, initialize, trace
    from .offload import Delayed, NVMe, Offload
    from .overlap import Overlap
    from .scale.dryrun import dryrun

__version__ = "0.1.0"

__all__ = [
    "Delayed", "Engine", "NVMe", "Offload", "Overlap", "Placement", "Plan", "Tracker",
    "add_config_arguments", "checkpoint", "comm", "consolidate", "default_ranks",
    "dryrun", "estimate", "estimate_activations", "init_distributed", "initialize",
    "launch", "parallelize", "scale", "see_memory_usage", "trace", "utils", "zero",
]  # fmt: skip

# Modules, and their names that are imported when one is asked for: reading configs and
# files costs time that a program without them should not pay.
_LATER = {
    "checkpoint": "checkpoint consolidate",
    "deepspeed": "add_config_arguments utils",
    "engine": "Engine initialize trace",
    "offload": "Delayed NVMe Offload",
    "overlap": "Overlap",
    "scale": "scale",
    "scale.dryrun": "dryrun",
}


def __getattr__(name: str) -> Any:
    for path, names in _LATER.items():
        if name in names.split():
            module = import_module(f".{path}", __name__)
            globals()[name] = found = getattr(module, name, module)
            return found
    raise AttributeError(f"module 'minizero' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minizero` brings the cell magic `%%ranks`."""
    from .lab import magic

    magic.load_ipython_extension(ipython)
