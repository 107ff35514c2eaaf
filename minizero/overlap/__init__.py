"""Collectives that are under way while a rank computes.

Read `schedule`, then `simulator`, which predicts when it pays. Imports `zero` and what
is below it.
"""

from .schedule import Overlap

__all__ = ["Overlap"]
