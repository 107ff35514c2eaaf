"""ZeRO from scratch: train models whose state is spread over ranks.

Names under `minizero.` are the public surface; each is told of in its chapter.
"""

from typing import Any

from . import comm, zero
from .delayed import Delayed
from .launch import default_ranks, init_distributed, launch
from .memory import Placement, Plan, estimate, estimate_activations
from .nvme import NVMe
from .offload import Offload
from .overlap import Overlap
from .tracker import Tracker, see_memory_usage
from .zero3 import parallelize

__version__ = "0.1.0"

__all__ = [
    "Delayed",
    "NVMe",
    "Offload",
    "Overlap",
    "Placement",
    "Plan",
    "Tracker",
    "comm",
    "default_ranks",
    "estimate",
    "estimate_activations",
    "init_distributed",
    "launch",
    "parallelize",
    "see_memory_usage",
    "zero",
]


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext minizero` brings the cell magic `%%ranks`."""
    from .lab import magic

    magic.load_ipython_extension(ipython)
