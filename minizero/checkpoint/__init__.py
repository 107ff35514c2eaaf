"""Sharded checkpoints: saves that survive a kill, loaded under any plan.

Read `commit`, `layout` (what is where), `save` and `load`; then `files` and `export`.
Imports `zero` and what is below it.
"""

from .export import consolidate, export, read_extra
from .files import CheckpointError
from .layout import Folder
from .load import Loaded, exists, load
from .save import finish, save

__all__ = [
    "CheckpointError",
    "Folder",
    "Loaded",
    "consolidate",
    "exists",
    "export",
    "finish",
    "load",
    "read_extra",
    "save",
]
