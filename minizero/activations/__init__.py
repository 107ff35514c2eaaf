"""What backward keeps, and three ways to keep less of it.

Read `saved_tensors` (measure), `recompute` and `selective` (keep less), `stores` (keep
it elsewhere), `functions` (any function, for the whole process); then what they rest
on: `hooks`, `host_copies`, `watching`. Imports `zero` and what is below it.
"""

from .recompute import MODES, Recompute, recompute_units
from .saved_tensors import SavedTensors, by_operator
from .selective import keep_matmuls
from .stores import Offloaded, Sharded, Store

__all__ = [
    "MODES",
    "Offloaded",
    "Recompute",
    "SavedTensors",
    "Sharded",
    "Store",
    "by_operator",
    "keep_matmuls",
    "recompute_units",
]
