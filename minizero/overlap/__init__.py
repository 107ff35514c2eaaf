"""Collectives that are under way while a rank computes.

Read `order`, `schedule`, then `simulator`, which predicts when it pays.
"""

from .schedule import Overlap

__all__ = ["Overlap"]
