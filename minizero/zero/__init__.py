"""Data parallelism and the three stages of ZeRO, on flat buffers.

Read in the order of the chapters:

- chapter 3: `units` and `flat_buffer` (what communicates together), `elementwise` (which
  optimizers can update shards), `interfaces` (what later chapters pass in), `verbs` (what
  a stage changes), `moves` (verbs launched when a schedule says so), `accumulation` and
  `backward` (gradients), `owned` and `update` (the step), `construction` and
  `data_parallel` (all of it);
- chapters 5 and 6: `stage1`, `stage2`;
- chapter 7: `absent` and `sharded_buffer` (a buffer that is whole while it is used),
  `autograd_hooks`, `absent_use`, `stage3`; `parallelize` and `init`.

Imports `comm`, `config`, `ranks` and `memory`.
"""

from .construction import nets_of
from .data_parallel import DataParallel
from .flat_buffer import Flat, Unit
from .init import GatheredParameters, Init, Source
from .interfaces import Home, Move, Near, NearShard, Precision, Schedule
from .parallelize import parallelize
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3
from .units import find_units

__all__ = [
    "DataParallel",
    "Flat",
    "GatheredParameters",
    "Home",
    "Init",
    "Move",
    "Near",
    "NearShard",
    "Precision",
    "Schedule",
    "Source",
    "Unit",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "find_units",
    "nets_of",
    "parallelize",
]
