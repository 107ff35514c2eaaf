"""Times of steps, and values of a run for TensorBoard."""

from __future__ import annotations

import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..ranks import rank


class Meter:
    """Times steps since the last report; with `detailed` also their phases.

    The time of loading data counts. The first step, which also warms up, does not.
    """

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self._ended: float | None = None  # the last step, in seconds
        self._begin()

    def _begin(self) -> None:
        self._steps = self._samples = 0
        self._seconds, self._phases = 0.0, defaultdict[str, float](float)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        begun = self._now()
        yield
        if self.detailed:
            self._phases[name] += self._now() - begun

    def _now(self) -> float:
        if self.detailed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def end_step(self, samples: int) -> None:
        """A step of so many samples on all ranks has ended."""
        before, self._ended = self._ended, self._now()
        self._steps += 1
        if before is not None:
            self._seconds += self._ended - before
            self._samples += samples

    def report(self) -> list[str]:
        """Samples a second of all ranks, milliseconds of each phase a step; begin anew."""
        parts = []
        if self._seconds:
            parts.append(f"samples/s={self._samples / self._seconds:.4g}")
        for name, seconds in self._phases.items():
            parts.append(f"{name}={1e3 * seconds / self._steps:.1f}ms")
        self._begin()
        return parts


def writer(config: Config) -> Any:
    """torch's `SummaryWriter` on rank 0, if the config has `tensorboard`; else None."""
    board = config.tensorboard
    if rank() != 0 or not board.enabled:
        return None
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        warnings.warn(f"no values for TensorBoard: {error}", stacklevel=2)
        return None
    return SummaryWriter(Path(board.output_path, board.job_name))
