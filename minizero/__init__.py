"""ZeRO from scratch: train models whose state is spread over ranks.

Names under `minizero.` are the public surface; each is told of in its chapter.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import comm, zero
from .launch import default_ranks, init_distributed, launch
from .memory import Placement, Plan, estimate, estimate_activations
from .tracker import Tracker, see_memory_usage
from .zero3 import parallelize

if TYPE_CHECKING:
    from . import checkpoint, checkpointing, utils
    from .arguments import add_config_arguments
    from .delayed import Delayed
    from .engine import Engine, initialize
    from .export import consolidate
    from .nvme import NVMe
    from .offload import Offload
    from .overlap import Overlap

__version__ = "0.1.0"

__all__ = [
    "Delayed",
    "Engine",
    "NVMe",
    "Offload",
    "Overlap",
    "Placement",
    "Plan",
    "Tracker",
    "add_config_arguments",
    "checkpoint",
    "checkpointing",
    "comm",
    "consolidate",
    "default_ranks",
    "estimate",
    "estimate_activations",
    "init_distributed",
    "initialize",
    "launch",
    "parallelize",
    "see_memory_usage",
    "utils",
    "zero",
]

# Names and the modules they are in, modules under themselves. They are
# imported when one is asked for: reading configs and files costs time that a
# program without them should not pay.
_LATER = {
    "Delayed": "delayed",
    "Engine": "engine",
    "NVMe": "nvme",
    "Offload": "offload",
    "Overlap": "overlap",
    "add_config_arguments": "arguments",
    "checkpoint": "checkpoint",
    "checkpointing": "checkpointing",
    "consolidate": "export",
    "initialize": "engine",
    "utils": "utils",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'minizero' has no attribute {name!r}")
    module = import_module(f".{_LATER[name]}", __name__)
    found = module if name == _LATER[name] else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minizero` brings the cell magic `%%ranks`."""
    from .lab import magic

    magic.load_ipython_extension(ipython)
