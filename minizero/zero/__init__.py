"""Data parallelism and the three stages of ZeRO, on flat buffers.

Read in the order of the chapters:

- chapter 3: `units` and `flat_buffer` (what communicates together), `elementwise` (which
  optimizers can update shards), `muon` and `muon_groups` (one that needs whole matrices,
  and which), `interfaces`
  (what later chapters pass in), `verbs` (what a stage changes), `moves` (verbs launched
  when a schedule says so), `script_changes` (what a script does by itself),
  `accumulation` and `backward` (gradients), `adopted`, `owned` and `update` (the step),
  `construction` and `data_parallel` (all of it);
- chapters 5 and 6: `stage1`, `stage2`;
- chapter 7: `absent_parameter`, `absent` and `sharded_buffer` (a buffer that is whole
  while it is used), `autograd_hooks`, `module_hooks`, `absent_use`, `stage3`;
  `parallelize`, `loading` and `init`;
- chapter 17: `group_buffers`, `group_shards`, `hierarchical` (the stages in groups).

Imports `comm`, `config`, `ranks` and `memory`.
"""

from typing import TYPE_CHECKING, Any

from .construction import nets_of
from .data_parallel import DataParallel
from .flat_buffer import Flat, Unit
from .init import GatheredParameters, Init
from .interfaces import Home, Move, Near, NearShard, Precision, Schedule
from .muon import Muon
from .parallelize import parallelize
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3
from .units import find_units

if TYPE_CHECKING:
    from ..config.source import Source

__all__ = [
    "DataParallel",
    "Flat",
    "GatheredParameters",
    "Home",
    "Init",
    "Move",
    "Muon",
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


def __getattr__(name: str) -> Any:
    """`Source`, when it is asked for: a config needs pydantic, and training does not."""
    if name != "Source":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ..config.source import Source

    return Source
