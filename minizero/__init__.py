"""ZeRO from scratch: train models whose state is spread over ranks.

Names under `minizero.` are the public surface; each is told of in its chapter.
"""

import sys
from importlib import import_module
from types import ModuleType
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
    from .deepspeed import parameters as checkpointing
    from .deepspeed import parameters as utils
    from .deepspeed.compat import add_config_arguments
    from .engine import Engine, initialize, trace
    from .offload import Delayed, NVMe, Offload
    from .overlap import Overlap
    from .scale.dryrun import dryrun

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
    "dryrun",
    "estimate",
    "estimate_activations",
    "init_distributed",
    "initialize",
    "launch",
    "parallelize",
    "scale",
    "see_memory_usage",
    "trace",
    "utils",
    "zero",
]

# Names and the folders they are in, modules under themselves. They are imported
# when one is asked for: reading configs and files costs time that a program without
# them should not pay.
_LATER = {
    "Delayed": "offload",
    "Engine": "engine",
    "NVMe": "offload",
    "Offload": "offload",
    "Overlap": "overlap",
    "add_config_arguments": "deepspeed",
    "checkpoint": "checkpoint",
    "checkpointing": "deepspeed.checkpointing",
    "consolidate": "checkpoint",
    "dryrun": "scale.dryrun",
    "initialize": "engine",
    "scale": "scale",
    "trace": "engine",
    "utils": "deepspeed.utils",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'minizero' has no attribute {name!r}")
    module = import_module(f".{_LATER[name]}", __name__)
    found = getattr(module, name, module)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def _find_later(name: str) -> None:
    """Let `import minizero.utils` find a module whose names are looked up later."""
    module = ModuleType(f"{__name__}.{name}", f"DeepSpeed's `deepspeed.{name}`.")
    vars(module)["__getattr__"] = lambda attribute: getattr(
        import_module(f".deepspeed.{name}", __name__), attribute
    )
    sys.modules[module.__name__] = module


for _name in ("checkpointing", "utils"):
    _find_later(_name)


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minizero` brings the cell magic `%%ranks`."""
    from .lab import magic

    magic.load_ipython_extension(ipython)
