"""Times of steps, and values of a run written to files."""

from __future__ import annotations

import csv
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..config import Config
from ..ranks import rank


class Meter:
    """Times steps; with `detailed` also their phases.

    It sums up `steps`, `seconds` (data loading included), `samples` of all ranks, and
    with `detailed` nanoseconds of `phases`, until `reported` is set; then it begins
    anew. `seconds` and `samples` leave the first step out, which also warms up.
    """

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self._ended: int | None = None
        self._begin()

    def _begin(self) -> None:
        self.steps = self.samples = 0
        self.seconds, self.phases = 0.0, Counter[str]()
        self.reported = False

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        if self.reported:
            self._begin()
        begun = self._now()
        yield
        if self.detailed:
            self.phases[name] += self._now() - begun

    def _now(self) -> int:
        if self.detailed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def end_step(self, samples: int) -> None:
        """A step of so many samples on all ranks has ended."""
        now, before, self.steps = self._now(), self._ended, self.steps + 1
        self._ended = now
        if before is not None:
            self.seconds += (now - before) / 1e9
            self.samples += samples

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of each phase, per step."""
        return {name: ns / 1e6 / self.steps for name, ns in self.phases.items()}

    @property
    def samples_per_second(self) -> float:
        """Of all ranks; 0.0 before the end of the second step."""
        return self.samples / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        parts = [f"{name}={ms:.1f}ms" for name, ms in self.milliseconds.items()]
        if self.seconds:
            parts.insert(0, f"samples/s={self.samples_per_second:.4g}")
        return ", ".join(parts)


class Monitor:
    """Writes values on rank 0, where `csv_monitor` and `tensorboard` of the config say.

    `enabled`: whether it writes anything.
    """

    def __init__(self, config: Config) -> None:
        self.folder: Path | None = None
        self.board: Any = None
        files, board = config.csv_monitor, config.tensorboard
        if rank() == 0 and files.enabled:
            self.folder = Path(files.output_path, files.job_name)
            self.folder.mkdir(parents=True, exist_ok=True)
        if rank() == 0 and board.enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter

                self.board = SummaryWriter(Path(board.output_path, board.job_name))
            except ImportError as error:
                warnings.warn(f"no values for TensorBoard: {error}", stacklevel=2)
        self.enabled = self.folder is not None or self.board is not None

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        """Write (name, value, samples so far): a row of a file, a point of a curve."""
        for name, value, samples in events:
            if self.folder is not None:
                path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
                new = not path.exists()
                with path.open("a", newline="") as file:
                    rows = csv.writer(file)
                    if new:
                        rows.writerow(["step", name.rpartition("/")[2]])
                    rows.writerow([samples, value])
            if self.board is not None:
                self.board.add_scalar(name, value, samples)
        if self.board is not None:
            self.board.flush()
