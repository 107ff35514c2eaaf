"""Sharded checkpoints: saves that survive a kill, loaded under any plan.

Read `api`, `manifest`, `commit`, then the machinery: `run_state`, `encoding`,
`tensor_file`, `reader`, `restore`, `directory`, `writer`, `export`. Imports `zero` and
what is below it.
"""

from .api import (
    Folder,
    finish,
    load,
    save,
)
from .export import (
    consolidate,
    export,
    open_run,
    weights,
)

__all__ = [
    "Folder",
    "consolidate",
    "export",
    "finish",
    "load",
    "open_run",
    "save",
    "weights",
]
