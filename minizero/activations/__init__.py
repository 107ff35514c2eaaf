"""What backward keeps, and three ways to keep less of it.

Read `saved_tensors` (measure), `stores` (keep it elsewhere) and `recompute` (keep less).
Imports `zero` and what is below it.
"""

from .recompute import MODES, Recompute, keep_matmuls, recompute_units
from .saved_tensors import SavedTensors, by_operator
from .stores import Offloaded, Sharded, Store

# one for the process: the engine sets its store, and DeepSpeed's names export it
CHECKPOINT = Recompute("full")
__all__ = ["CHECKPOINT", "MODES", "Offloaded", "Recompute", "SavedTensors", "Sharded"]
__all__ += ["Store", "by_operator", "keep_matmuls", "recompute_units"]
