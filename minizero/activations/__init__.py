"""What backward keeps, and three ways to keep less of it.

Read `saved_tensors` (measure), `selective` and `stores` (what to keep, and where), and
`checkpointing`. Imports `zero` and what is below it.
"""

from .checkpointing import (
    MODES,
    Checkpointing,
    checkpoint_units,
)

__all__ = [
    "Checkpointing",
    "MODES",
    "checkpoint_units",
]
