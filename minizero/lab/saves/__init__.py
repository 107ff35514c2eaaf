"""Checkpoints: their figures, what saves and failures cost, and an explorable of it."""

from __future__ import annotations

from .figures import loading_figure, rows_figure, stops_figure
from .interval import SaveInterval, best_interval, interval_figure, lost, save_interval

__all__ = [
    "SaveInterval",
    "best_interval",
    "interval_figure",
    "loading_figure",
    "lost",
    "rows_figure",
    "save_interval",
    "stops_figure",
]
