"""Data parallelism and the three stages of ZeRO, on flat buffers.

Read `flat` (buffers), `build` (what shares one), `seams` (what later chapters pass in,
and the base class that calls it), `data_parallel`, `stage1` to `stage3`, `parallelize`
(any plan), `init` (sharded parameters by hand), `guards` (mistakes), and `muon`.
"""

from .build import find_units
from .data_parallel import DataParallel
from .flat import Flat, Slot, Unit
from .guards import is_sharded, nets_of
from .init import GatheredParameters, Init, owners
from .muon import Muon
from .parallelize import parallelize
from .seams import Action, Precision, Schedule, Storage
from .stage1 import ZeRO1
from .stage2 import ZeRO2
from .stage3 import ZeRO3

__all__ = ["Action", "DataParallel", "Flat", "GatheredParameters", "Init", "Muon"]
__all__ += ["Precision", "Schedule", "Slot", "Storage", "Unit", "ZeRO1", "ZeRO2"]
__all__ += ["ZeRO3", "find_units", "is_sharded", "nets_of", "owners", "parallelize"]
