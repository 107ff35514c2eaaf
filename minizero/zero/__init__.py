"""Data parallelism and the three stages of ZeRO, on flat buffers.

Read in the order of the chapters: `units`, `flat_buffer`, `elementwise`, `interfaces`,
`verbs`, `backward`, `update`, `data_parallel`; `stage1`; `stage2`; `sharded_buffer`,
`autograd_hooks`, `regather`, `stage3`, `parallelize` and `init`. Imports `comm`, `ranks`, `memory`.
"""

from .data_parallel import (
    DataParallel,
    nets_of,
)
from .init import (
    GatheredParameters,
    Init,
    Source,
)
from .parallelize import (
    parallelize,
)
from .stage1 import (
    ZeRO1,
)
from .stage2 import (
    ZeRO2,
)
from .stage3 import (
    ZeRO3,
)

__all__ = [
    "DataParallel",
    "GatheredParameters",
    "Init",
    "Source",
    "ZeRO1",
    "ZeRO2",
    "ZeRO3",
    "nets_of",
    "parallelize",
]
