"""Where the bytes of training live: the plan, the formulas, and what is measured.

Read `plan` (the table of the stages, and `estimate`), `live_bytes` (the count of what is
alive, by storage), `labels` (what a storage is for), `tracker` (that count over time),
`trace` (that count beside what the ranks did), `intensity` (how fast a link or a disk must
be) and `bytes` (alignment and host memory). Imports nothing of minizero.
"""

from .bytes import (
    aligned,
    host_empty,
    view,
)
from .intensity import (
    efficiency,
    intensity,
)
from .labels import (
    Watcher,
    host_memory,
    label,
    label_states,
    labelled_bytes,
    mark,
    on_host,
)
from .plan import (
    OPTIMIZERS,
    PLACES,
    PRECISIONS,
    Breakdown,
    Bytes,
    Placement,
    Plan,
    estimate,
    estimate_activations,
)
from .tracker import (
    Sample,
    Tracker,
    see_memory_usage,
)

__all__ = [
    "Breakdown",
    "Bytes",
    "OPTIMIZERS",
    "PLACES",
    "PRECISIONS",
    "Placement",
    "Plan",
    "Sample",
    "Tracker",
    "Watcher",
    "aligned",
    "efficiency",
    "estimate",
    "estimate_activations",
    "host_empty",
    "host_memory",
    "intensity",
    "label",
    "label_states",
    "labelled_bytes",
    "mark",
    "on_host",
    "see_memory_usage",
    "view",
]
