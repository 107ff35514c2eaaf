"""Values of a run, written as CSV files and for TensorBoard."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..config import Config
from ..ranks.launch import rank

Event = tuple[str, float, int]  # name, value, samples so far


class Monitor:
    """Writes events on rank 0, where `tensorboard` and `csv_monitor` say.

    `enabled`: whether it writes anything. A warning if TensorBoard is not installed.
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
                warnings.warn(
                    f"nothing is written for TensorBoard ({error}); install "
                    "tensorboard, or use csv_monitor",
                    stacklevel=2,
                )
        self.enabled = self.folder is not None or self.board is not None

    def write_events(self, events: Iterable[Event]) -> None:
        """A row in the file of each name, a point in each curve."""
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
