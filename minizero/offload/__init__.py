"""State in host memory or on disk, and updates that are made where it is stored.

Read `bus` and `host` (host memory), `delayed` (an update beside the next step), then
`swap_file`, `staging`, `disk` and `nvme`. Imports `zero` and what is below it.
"""

from .bus import CopyStream
from .delayed import Delayed
from .host import Offload
from .nvme import NVMe
from .swap_file import DiskFault

__all__ = ["CopyStream", "Delayed", "DiskFault", "NVMe", "Offload"]
