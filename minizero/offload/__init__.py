"""State in host memory or on disk, and updates that are made where it is stored.

Read `host` (host memory), `delayed` (an update that runs beside the next step), then
`swap_file` and `nvme` (disk). Imports `zero` and what is below it.
"""

from .delayed import Delayed
from .host import CopyEvent, CopyStream, DoubleBuffer, Offload
from .nvme import NVMe
from .swap_file import DiskFault

__all__ = [
    "CopyEvent",
    "CopyStream",
    "Delayed",
    "DiskFault",
    "DoubleBuffer",
    "NVMe",
    "Offload",
]
