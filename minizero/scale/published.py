"""Runs of FSDP that were published, and how far the predictions of them are off.

`published.csv`: MPT models under PyTorch's FSDP, the 216 rows of the page
`scripts/train/benchmarking` of MosaicML's llm-foundry. FULL_SHARD is stage 3,
SHARD_GRAD_OP stage 2; gradients are reduced in fp32 where the page says DEFAULT, in bf16
where it says PURE.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

from .machines import Machine
from .predict import Prediction, predict
from .shapes import MODELS


@dataclass(frozen=True)
class Row:
    """One row of `published.csv`; `tokens` a second and GPU, as published."""

    model: str
    machine: str
    gpus: int
    stage: int
    sequence: int
    micro_batch: int
    accumulation: int
    precision: str
    reduce: str
    checkpointing: str
    tokens: float

    def predict(self, machine: Machine | None = None) -> Prediction:
        """The prediction of this row, on its machine or on another."""
        options: dict[str, Any] = dict(vars(self))
        for name in ("model", "machine", "gpus", "tokens"):
            del options[name]
        return predict(
            **vars(MODELS[self.model]),
            **options,
            world_size=self.gpus,
            machine=machine or self.machine,
        )

    def error(self, machine: Machine | None = None) -> float:
        """Predicted over published tokens a second, less 1."""
        return self.predict(machine).tokens_per_second_per_gpu / self.tokens - 1


def rows() -> list[Row]:
    """All rows of `published.csv`."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8") as file:
        return [
            Row(**{k: _number(v) for k, v in line.items()})
            for line in csv.DictReader(file)
        ]


def _number(text: str) -> Any:
    return int(text) if text.isdigit() else text


def mean_error(errors: Iterable[float]) -> float:
    """The mean of their sizes."""
    sizes = [abs(e) for e in errors]
    return sum(sizes) / len(sizes)


def calibrate(machine: Machine, chosen: Sequence[Row], finest: float = 0.01) -> Machine:
    """The machine whose two constants fit these rows: its mean error is least.

    Steps of 8 % and of halves of it, down to `finest`, as long as they help.
    """

    def loss(machine: Machine) -> float:
        return mean_error(log(1 + row.error(machine)) for row in chosen)

    best, step = loss(machine), 0.08
    while step >= finest:
        helped = False
        for name in ("matmul", "attention"):
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(machine, name) * factor
                other = replace(machine, **{name: value})
                if (now := loss(other)) < best:
                    machine, best, helped = other, now, True
        step = step if helped else step / 2
    return machine
