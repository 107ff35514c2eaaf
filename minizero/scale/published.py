"""Runs that others published, and how far the predictions of them are off.

`published.csv` has two sets of runs:

- "mpt": MPT models under PyTorch's FSDP, the 216 rows of the page
  `scripts/train/benchmarking` of MosaicML's llm-foundry. FULL_SHARD is stage 3,
  SHARD_GRAD_OP stage 2; gradients are reduced in fp32 where the page says DEFAULT, in
  bf16 where it says PURE. Their loss is a fused kernel. Each machine's two constants
  are fitted to those of 8 GPUs.
- "fsdp": seven runs of Llama 2 and 3 under FSDP by others, in bf16 with flash attention.
  No constant was fitted to them.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

from .cost import Candidate, Job
from .machines import MACHINES, Machine
from .predict import Prediction, predict
from .shapes import MODELS


@dataclass(frozen=True, kw_only=True)
class Row(Candidate):
    """A published run: a candidate, its job, and its tokens a second and GPU."""

    runs: str
    model: str
    machine: str
    gpus: int
    sequence: int
    tokens: float
    name: str = ""
    source: str = "mosaicml2023benchmarks"
    precision: str = "bf16"
    reduce: str | None = None

    @property
    def job(self) -> Job:
        return Job(
            MODELS[self.model], MACHINES[self.machine], self.gpus,
            self.gpus * self.accumulation * self.micro_batch, self.sequence,
            self.precision, reduce=self.reduce, logit=4 if self.runs == "mpt" else 12,
        )  # fmt: skip

    def predict(self, machine: Machine | None = None) -> Prediction:
        """The prediction of this run, on its machine or on another."""
        job = self.job
        return predict(replace(job, machine=machine or job.machine), self)

    def error(self, machine: Machine | None = None) -> float:
        """Predicted over published tokens a second, less 1."""
        return self.predict(machine).tokens_per_second_per_gpu / self.tokens - 1


def rows(runs: str = "mpt") -> list[Row]:
    """The runs of a set: "mpt" or "fsdp"."""

    def value(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError:
            return text

    with Path(__file__).with_name("published.csv").open(encoding="utf-8") as file:
        lines = [line for line in csv.DictReader(file) if line["runs"] == runs]
    return [Row(**{k: value(v) for k, v in line.items() if v}) for line in lines]


def mean_error(errors: Iterable[float]) -> float:
    """The mean of their absolute values."""
    return fmean(map(abs, errors))


def calibrate(machine: Machine, chosen: Sequence[Row]) -> Machine:
    """The machine with the two constants whose mean error over these runs is least.

    A search: each constant is moved by 8 % as long as that helps, then by 4 %, and so
    on, down to 1 %. Twice too fast counts as much as twice too slow.
    """

    def loss(machine: Machine) -> float:
        return mean_error(log(1 + row.error(machine)) for row in chosen)

    best, step = loss(machine), 0.08
    while step >= 0.01:
        before = best
        for name in ("matmul", "attention"):
            for factor in (1 + step, 1 / (1 + step)):
                other = replace(machine, **{name: getattr(machine, name) * factor})
                if (now := loss(other)) < best:
                    machine, best = other, now
        step = step if best < before else step / 2
    return machine
