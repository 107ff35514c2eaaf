"""Runs that others published, and how far the predictions of them are off.

`published.csv` has three sets of runs:

- "mpt": MPT models under PyTorch's FSDP, the 216 rows of the page
  `scripts/train/benchmarking` of MosaicML's llm-foundry. FULL_SHARD is stage 3,
  SHARD_GRAD_OP stage 2; gradients are reduced in fp32 where the page says DEFAULT, in
  bf16 where it says PURE. Their loss is a fused kernel. Each machine's two constants
  are fitted to those of 8 GPUs.
- "fsdp": FSDP elsewhere, in bf16 with flash attention. No constant was fitted to them;
  that torchtitan repeats every other linear layer was read in its code.
- "deepspeed": ZeRO-3 in DeepSpeed, in fp16 with full checkpointing and attention that
  writes its scores, as it was up to 2023. No constant was fitted to them, but it was
  known what they are when the memory passes to count were chosen.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import log
from pathlib import Path
from typing import Any

from ..overlap import Overlap
from ..zero import Schedule
from .cost import Candidate
from .machines import A100, H100, MACHINES, NETWORK, V100, Machine
from .predict import Prediction, ahead, predict
from .shapes import MODELS, Shape

VARIANTS = {
    # as if each GPU fetched all that it gathers through its own port
    "a100-own-port": replace(A100, network=A100.network / A100.gpus),
    # four to a node; an all-reduce of 64 of them was measured at 54.2 Gbit/s a node,
    # where the ports are of 400 in all (BigScience, experiments/bandwidth)
    "v100-jean-zay": replace(
        V100, gpus=4, link=75e9, network=54.2e9 / 8 / 4 / NETWORK, shared=2
    ),
    "v100-four-ports": replace(V100, network=50e9 / 16),  # of 100 Gbit/s a node
    # Grand Teton with HBM2e, at 500 W
    "h100-96gb": replace(H100, hbm=2400e9, memory=96e9),
}
"""Machines of single runs, beside those of `MACHINES`."""


def not_ahead(largest: int) -> Schedule:
    """DeepSpeed's prefetch with its defaults, as far as this model has it: units above
    5e7 elements are not gathered ahead. (It gathers parameters, not units, and at least
    one of them ahead.)"""
    return Overlap(50_000_000, 1 << 60, 0)


@dataclass(frozen=True, kw_only=True)
class Row(Candidate):
    """A way to train that was run: `tokens` a second and GPU, `seconds` of a step, or
    `tflops`, as published.

    gib: of a GPU at the peak, where that was published. The other fields are those of
    `predict`.
    """

    runs: str
    model: str
    machine: str
    gpus: int
    sequence: int
    name: str = ""
    source: str = "mosaicml2023benchmarks"
    precision: str = "bf16"
    reduce: str | None = None
    attention: str = "flash"
    tokens: float = 0.0
    seconds: float = 0.0
    tflops: float = 0.0
    gib: float = 0.0

    @property
    def shape(self) -> Shape:
        return MODELS[self.model]

    @cached_property
    def published(self) -> float:
        """Tokens a second and GPU.

        FLOP a second are published with those of recomputation and of all scores, as
        Narayanan et al. 2021 count them (eq. 3).
        """
        if self.seconds:
            return self.micro_batch * self.sequence / self.seconds
        if self.tokens:
            return self.tokens
        shape, h = self.shape, self.shape.hidden
        block = 8 * shape.block + 16 * self.sequence * h
        flops = shape.layers * block + 6 * h * shape.vocab
        return self.tflops * 1e12 / flops

    def predict(self, machine: Machine | None = None) -> Prediction:
        """The prediction of this run, on its machine or on another."""
        return predict(
            self.shape,
            machine or (MACHINES | VARIANTS)[self.machine],
            self,
            sequence=self.sequence,
            world_size=self.gpus,
            precision=self.precision,
            reduce=self.reduce,
            attention=self.attention,
            logit=4 if self.runs == "mpt" else 12,
            schedule=not_ahead if self.runs == "deepspeed" else ahead,
        )

    def error(self, machine: Machine | None = None) -> float:
        """Predicted over published tokens a second, less 1."""
        return self.predict(machine).tokens_per_second_per_gpu / self.published - 1


def rows(runs: str = "mpt") -> list[Row]:
    """The runs of a set: "mpt", "fsdp" or "deepspeed"."""

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
    sizes = [abs(e) for e in errors]
    return sum(sizes) / len(sizes)


def calibrate(machine: Machine, chosen: Sequence[Row], finest: float = 0.01) -> Machine:
    """The machine whose two constants fit these runs: its mean error is least.

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
