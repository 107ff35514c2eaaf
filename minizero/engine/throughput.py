"""How long the phases of a step take; samples and FLOPs a second."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Throughput:
    """What some steps took; a sum of two is that of all their steps.

    `seconds`: from the end of the step before the first of them to the end
        of the last, data loading and all else included.
    `samples`: of all ranks.
    `phases`: nanoseconds of forward, backward and step on this rank, of all
        micro-batches; empty unless they were timed.
    `flops`: model FLOPs of this rank; 0 unless they were counted.
    """

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    phases: Counter[str] = field(default_factory=Counter)
    flops: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Throughput(*(a + b for a, b in pairs))

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of each phase, a step."""
        return {name: ns / 1e6 / self.steps for name, ns in self.phases.items()}

    @property
    def samples_per_second(self) -> float:
        """Of all ranks; 0.0 before the end of the second step."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tflops(self) -> float:
        """Model FLOPs of this rank, 10^12 a second."""
        return self.flops / self.seconds / 1e12 if self.seconds else 0.0

    def __str__(self) -> str:
        parts = []
        if self.seconds:
            parts.append(f"samples/s={self.samples_per_second:.4g}")
        parts += [f"{name}={ms:.1f}ms" for name, ms in self.milliseconds.items()]
        if self.tflops:
            parts.append(f"model TFLOPS={self.tflops:.3g}")
        return ", ".join(parts)


class Meter:
    """Times steps; with `detailed` their phases too, and counts FLOPs.

    Without `detailed` it reads the clock once a step, and no more.
    """

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self.forward_flops: int | None = None  # of one micro-batch
        self.last = Throughput()  # the last step
        self.recent = Throughput()  # since the last `reset`
        self._phases: Counter[str] = Counter()
        self._ended: int | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase of this step."""
        if not self.detailed:
            yield
            return
        begun = self._now()
        try:
            if name == "forward" and self.forward_flops is None:
                with counting() as counter:
                    yield
                self.forward_flops = counter.get_total_flops()
            else:
                yield
        finally:
            self._phases[name] += self._now() - begun

    def _now(self) -> int:
        if self.detailed and torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter_ns()

    def end_step(self, samples: int, micro_batches: int) -> None:
        """A step of so many samples on all ranks has ended.

        Model FLOPs count a backward as two forwards, and recomputation not
        at all (Chowdhery et al. 2022, app. B).
        """
        now, before = self._now(), self._ended
        phases, self._phases, self._ended = self._phases, Counter(), now
        if before is None:  # the first: it made what later steps find
            self.last = Throughput(1, phases=phases)
            return
        flops = 3 * (self.forward_flops or 0) * micro_batches
        self.last = Throughput(1, (now - before) / 1e9, samples, phases, flops)
        self.recent += self.last

    def reset(self) -> None:
        """Begin a new average."""
        self.recent = Throughput()

    def update_epoch_count(self) -> None:
        """Scripts for DeepSpeed say so when an epoch ends; steps are all timed alike."""

    def avg_samples_per_sec(self) -> float:
        """Of all ranks, since the last report."""
        return self.recent.samples_per_second


def counting(depth: int | None = None) -> Any:
    """A block whose products of matrices are counted: `get_total_flops`, `get_table`.

    `depth`: of modules in the table; None: all.
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    # torch knows that of GPUs only
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    deepest = 10**6 if depth is None else depth
    return FlopCounterMode(None, deepest, False, {on_cpu: attention})


@contextmanager
def profiled(depth: int, path: str | None) -> Iterator[None]:
    """Write a table of the block's FLOPs, by module, to a file or standard output."""
    with counting(None if depth < 0 else depth) as counter:
        yield
    table = counter.get_table()
    if path is None:
        print(table, flush=True)
    else:
        Path(path).write_text(f"{table}\n")
