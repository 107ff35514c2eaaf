"""The fastest plan among those that fit, and the config that does it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from ..memory.labels import amount
from .candidates import Candidate, Job, candidates
from .memory import Memory, needed
from .predict import ITEMSIZES, Prediction, predict

UNSURE = 0.25
"""By which share `needed` may be off: within it, a `Job.peak` is asked."""
SAME = 0.04
"""The mean error of a prediction: steps that differ by less are equal."""


@dataclass(frozen=True)
class Result:
    """A candidate, what it needs, and what is predicted of it, when that is asked."""

    job: Job
    candidate: Candidate

    @cached_property
    def memory(self) -> Memory:
        """Bytes of a rank."""
        c, job = self.candidate, self.job
        size = ITEMSIZES[job.precision]
        return needed(
            job.shape, c.micro_batch * job.sequence, job.sequence, job.gpus, c.plan,
            job.precision, c.checkpointing, size,
        )  # fmt: skip

    @property
    def allowed(self) -> bool:
        """Whether it may be chosen."""
        return self.job.quantize or not self.candidate.weight_bits

    @property
    def unsure(self) -> bool:
        """Whether what it takes on the device is asked, not computed."""
        near = abs(self.memory.total / self.job.room - 1) <= UNSURE
        return self.job.peak is not None and near

    @cached_property
    def needs(self) -> float:
        """Bytes of the device."""
        if self.job.peak is None or not self.unsure:
            return self.memory.total
        return self.job.peak(self.candidate)

    @property
    def may_fit(self) -> bool:
        """As far as the formula knows."""
        here = self.unsure or self.memory.total <= self.job.room
        return here and self.memory.host <= self.job.host

    @property
    def fits(self) -> bool:
        """On the device, and with all ranks of a node in the host."""
        return self.may_fit and self.needs <= self.job.room

    @cached_property
    def prediction(self) -> Prediction:
        """A step of this job in this way."""
        job = self.job
        return predict(
            **vars(job.shape),
            **vars(self.candidate),
            sequence=job.sequence,
            world_size=job.gpus,
            gpus_per_node=job.machine.gpus,
            machine=job.machine,
            precision=job.precision,
        )

    def seconds(self) -> float:
        """Of a step."""
        return self.prediction.step_seconds


@dataclass(frozen=True)
class Choice:
    """best: the fastest that fits. others: the fastest of each other kind that fits,
    and the smallest of those that do not."""

    job: Job
    best: Result
    others: list[Result]

    def loses(self, other: Result) -> float:
        """The share of its time that another plan costs more."""
        return other.seconds() / self.best.seconds() - 1


def choose(job: Job) -> Choice:
    """The fastest candidate that fits, of equals the simplest.

    ValueError if none fits.
    """
    results = [Result(job, candidate) for candidate in candidates(job)]
    by_time = sorted((r for r in results if r.may_fit), key=Result.seconds)
    best = next((r for r in by_time if r.allowed and r.fits), None)
    if best is None:
        least = min((r for r in results if r.allowed), key=lambda r: max(
            r.memory.total / job.room, r.memory.host / job.host
        ))  # fmt: skip
        raise ValueError(
            f"nothing fits {job.gpus} GPUs with room for {amount(job.room)} each: "
            f"{least.candidate} needs {amount(least.memory.total)}, and "
            f"{amount(least.memory.host)} of {amount(job.host)} of the host; use more "
            "GPUs, or a shorter sequence"
        )
    near = (1 + SAME) * best.seconds()
    equals = [r for r in by_time if r.seconds() <= near and r.allowed and r.fits]
    best = min(equals, key=lambda r: (r.candidate.extras, r.seconds()))
    others = []
    for kind in dict.fromkeys(r.candidate.kind for r in results):
        fitting = (r for r in by_time if r.candidate.kind == kind and r.fits)
        every = (r for r in results if r.candidate.kind == kind)
        least = min(every, key=lambda r: r.memory.total)
        others.append(next(fitting, least))
    others = [r for r in others if r.candidate.kind != best.candidate.kind]
    others.sort(key=lambda r: r.seconds() if r.fits else inf)
    return Choice(job, best, others)


def ds_config(choice: Choice) -> dict[str, Any]:
    """The config of the best, for `minizero.initialize` or DeepSpeed.

    A bucket holds the largest unit, which is whole once in any case, and no more.
    """
    job, best = choice.job, choice.best.candidate
    unit = max(job.shape.block, job.shape.root)
    zero: dict[str, Any] = {
        "stage": best.stage,
        "overlap_comm": True,
        "reduce_bucket_size": min(unit, 500_000_000),
    }
    if best.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": unit,
            "stage3_max_live_parameters": 3 * unit + 4 * job.gpus,
            "stage3_param_persistence_threshold": 0,
        }
    if best.group:
        zero["mics_shard_size"] = best.group
    if best.secondary:
        zero["zero_hpz_partition_size"] = best.secondary
    if best.weight_bits:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    for name in ("offload_optimizer", "offload_param"):
        if place := getattr(best, name):
            zero[name] = {"device": place, "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": best.micro_batch,
        "gradient_accumulation_steps": best.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        **({} if job.precision == "fp32" else {job.precision: {"enabled": True}}),
        "zero_optimization": zero,
    }
