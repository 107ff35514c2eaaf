"""ZeRO from scratch: train models whose state is spread over ranks.

Names under `minizero.` are the public surface; each is told of in its chapter.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
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
    from .deepspeed import checkpointing
    from .deepspeed import parameters as utils
    from .deepspeed.arguments import add_config_arguments
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
    "add_config_arguments": "deepspeed.arguments",
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


class _ShortNames(MetaPathFinder, Loader):
    """`import minizero.utils` is `import minizero.deepspeed.utils`, likewise others.

    As DeepSpeed has them, so that a script needs one word changed.
    """

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, short = name.rpartition(".")
        told = package == __name__ and short in ("checkpointing", "utils")
        return ModuleSpec(name, self) if told else None

    def exec_module(self, module: ModuleType) -> None:
        short = module.__name__.rpartition(".")[2]
        # what stands here when this returns is what the import gives
        sys.modules[module.__name__] = import_module(f".{_LATER[short]}", __name__)


sys.meta_path.append(_ShortNames())


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minizero` brings the cell magic `%%ranks`."""
    from .lab import magic

    magic.load_ipython_extension(ipython)
