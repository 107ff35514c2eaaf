"""State that lives in host memory or on disk, and updates that work there.

Read `copy_streams`, `lending`, `host`, `second_set`, `delayed_update`; then, for the
disk, `async_io`, `swap_file`, `staging`, `read_ahead`, `nvme_storage`, `nvme`. Imports
`zero` and what is below it.
"""

from .async_io import DiskFault
from .delayed_update import Delayed
from .host import Offload
from .nvme import NVMe

__all__ = ["Delayed", "DiskFault", "NVMe", "Offload"]
