"""Times and FLOPs of steps, and values of a run written to files."""

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
    """Times steps; with `detailed` also their phases, and counts FLOPs.

    It sums up `steps`, `seconds` (data loading included), `samples` of all ranks, and
    with `detailed` nanoseconds of `phases` and model `flops` of this rank, since the last
    `reset`. `forward_flops`: of one micro-batch; None before it was counted.
    """

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self.forward_flops: int | None = None
        self._ended: int | None = None
        self.reset()

    def reset(self) -> None:
        """Begin a new sum."""
        self.steps = self.samples = self.flops = 0
        self.seconds, self.phases = 0.0, Counter[str]()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        if not self.detailed:
            yield
            return
        begun = self._now()
        if name == "forward" and self.forward_flops is None:
            with count_flops() as counter:
                yield
            self.forward_flops = counter.get_total_flops()
        else:
            yield
        self.phases[name] += self._now() - begun

    def _now(self) -> int:
        if self.detailed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def end_step(self, samples: int, micro_batches: int) -> None:
        """A step of so many samples on all ranks has ended.

        A backward counts as two forwards, and recomputation does not count (Chowdhery et
        al. 2022, app. B). The rates leave the first step out: it also warms up.
        """
        now, before, self.steps = self._now(), self._ended, self.steps + 1
        self._ended = now
        if before is not None:
            self.seconds += (now - before) / 1e9
            self.samples += samples
            self.flops += 3 * (self.forward_flops or 0) * micro_batches

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
        if self.flops:
            parts.append(f"model TFLOPS={self.flops / self.seconds / 1e12:.3g}")
        return ", ".join(parts)


def count_flops() -> Any:
    """torch's FLOP counter, which lacks the attention of CPUs: a context manager."""
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={on_cpu: attention})


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
