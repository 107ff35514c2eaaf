"""State that lives in host memory or on disk, and updates that work there.

Read `copy_streams`, `host`, `delayed_update`; then, for the disk, `async_io`, `swap_file`,
`staging`, `nvme_storage`, `nvme`. Imports `zero` and what is below it.
"""

from .delayed_update import (
    Delayed,
)
from .host import (
    Near,
    Offload,
    place,
)
from .nvme import (
    NVMe,
)

__all__ = [
    "Delayed",
    "NVMe",
    "Near",
    "Offload",
    "place",
]
