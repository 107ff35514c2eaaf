"""What is to be trained, and the ways to train it that a planner looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..memory.plan import Plan
from .machines import Machine
from .shapes import Shape, check_choices, check_counts

LARGEST = 256
"""Sequences of a micro-batch at most."""

KEPT = "none", "matmuls", "full"
"""What may be recomputed; "matmuls" is the engine's selective checkpointing."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and where; `sequences`: a step's, of all ranks.

    quantize: whether a plan may round what is sent (ZeRO++), which changes losses.
    peak: bytes of a device that a candidate takes, of a run or a dry run; asked where
        the formula is not sure.
    """

    shape: Shape
    machine: Machine
    gpus: int
    sequences: int
    sequence: int
    precision: str = "bf16"
    quantize: bool = False
    peak: Callable[[Candidate], float] | None = None

    def __post_init__(self) -> None:
        check_counts(gpus=self.gpus, sequence=self.sequence)
        check_choices(precision=(self.precision, ("bf16", "fp16", "fp32")))
        if self.sequences < self.gpus:
            raise ValueError(
                f"a step of {self.sequences} sequences leaves some of {self.gpus} GPUs "
                f"without any; give at least {self.gpus * self.sequence:,} tokens to a "
                "step, or use fewer GPUs"
            )
        if self.sequences % self.gpus:
            raise ValueError(
                f"{self.sequences} sequences cannot be shared equally by {self.gpus} "
                f"GPUs; use {self.each * self.gpus} or {(self.each + 1) * self.gpus}"
            )

    @property
    def each(self) -> int:
        """Sequences of a rank in a step."""
        return self.sequences // self.gpus

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may use."""
        return (1 - self.machine.reserved) * self.machine.memory

    @property
    def host(self) -> float:
        """A rank's share of the host's memory."""
        shared = min(self.machine.gpus, self.gpus)
        return (1 - self.machine.reserved) * self.machine.host / shared


@dataclass(frozen=True)
class Candidate:
    """One way to train: `predict` says how fast, and with how much memory."""

    stage: int
    checkpointing: str
    micro_batch: int
    accumulation: int
    offload_optimizer: str | None = None
    offload_param: str | None = None
    group: int | None = None
    secondary: int | None = None
    weight_bits: int | None = None
    gradient_bits: int | None = None

    @property
    def plan(self) -> Plan:
        """Where it places each category."""
        found = Plan.stage(
            self.stage, self.offload_optimizer, self.offload_param, self.group
        )
        if self.secondary is None:
            return found
        copy = replace(found.parameters, group=self.secondary)
        return replace(found, parameters=copy)

    @property
    def recompute(self) -> str:
        """`checkpointing`, as `recompute_units` takes it."""
        return self.checkpointing.replace("matmuls", "selective")

    @property
    def extras(self) -> int:
        """How much there is beside a stage: what is moved, grouped and coded."""
        moved = self.offload_optimizer, self.offload_param, self.weight_bits
        return sum(map(bool, (*moved, self.group or self.secondary)))

    @property
    def kind(self) -> str:
        """Stage, groups, codes and offload, in words."""
        moved = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        off = " and ".join(name for name, place in moved.items() if place)
        return "".join((
            f"stage {self.stage}",
            f" in groups of {self.group}" if self.group else "",
            f", parameters in groups of {self.secondary}" * bool(self.secondary),
            ", sent in 8 and 4 bits" if self.weight_bits else "",
            f", {off} on the CPU" if off else "",
        ))  # fmt: skip

    @property
    def how(self) -> str:
        """Checkpointing and micro-batches, in words."""
        kept = self.recompute.replace("none", "no")
        return (
            f"{kept} checkpointing; {self.accumulation} x {self.micro_batch} sequences"
        )

    def __str__(self) -> str:
        return f"{self.kind}; {self.how}"


def candidates(job: Job) -> Iterator[Candidate]:
    """All plans, offloads, checkpointings and micro-batches that make the batch.

    In groups, and with copies of the parameters alone: those of a node's GPUs, where
    there are several nodes.
    """
    places: list[dict[str, Any]] = [{"stage": stage} for stage in range(4)]
    places += [{"stage": s, "offload_optimizer": "cpu"} for s in (1, 2, 3)]
    places += [{"stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}]
    node = job.machine.gpus
    if node > 1 and job.gpus > node and job.gpus % node == 0:
        copy = {"stage": 3, "secondary": node}
        places += [{"stage": stage, "group": node} for stage in (1, 2, 3)]
        places += [copy, copy | {"weight_bits": 8, "gradient_bits": 4}]
    for place in places:
        for how in KEPT:
            for size in range(1, min(job.each, LARGEST) + 1):
                if job.each % size == 0:
                    yield Candidate(
                        checkpointing=how, micro_batch=size,
                        accumulation=job.each // size, **place,
                    )  # fmt: skip
