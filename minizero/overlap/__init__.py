"""Collectives that are under way while a rank computes.

Read `schedule`, then `simulator`, which predicts when it pays.
"""

from .schedule import Overlap

__all__ = ["Overlap"]
