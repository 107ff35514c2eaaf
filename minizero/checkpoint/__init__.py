"""Sharded checkpoints: saves that survive a kill, loaded under any plan.

Read `api`, `commit`, `manifest`, `resharding`; then what they stand on: `directory`
(names), `run_state` (what is saved), `writer`, `reader`, `restore`, `tensor_file`,
`encoding`; and `export`. Imports `zero` and what is below it.
"""

from .api import finish, load, save
from .directory import Folder, exists
from .export import consolidate, export, open_run, weights
from .restore import Loaded
from .tensor_file import CheckpointError
from .writer import Saving

__all__ = [
    "CheckpointError",
    "Folder",
    "Loaded",
    "Saving",
    "consolidate",
    "exists",
    "export",
    "finish",
    "load",
    "open_run",
    "save",
    "weights",
]
