"""The fastest plan among those that fit, and why not another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .machines import Machine
from .memory import Memory
from .predict import Prediction, predict
from .shapes import Shape

RESERVED = 0.1
"""The share of a device that CUDA, NCCL and the allocator's gaps take."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, and where; `sequences`: a step's, of all ranks."""

    shape: Shape
    machine: Machine
    gpus: int
    sequences: int
    sequence: int
    precision: str = "bf16"

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.sequence < 1:
            raise ValueError("gpus and sequence must be at least 1")
        if self.sequences < self.gpus:
            raise ValueError(
                f"a step of {self.sequences} sequences leaves some of {self.gpus} GPUs "
                "without any; give more tokens to a step, or use fewer GPUs"
            )

    @property
    def each(self) -> int:
        """Sequences of a rank in a step."""
        return self.sequences // self.gpus

    @property
    def room(self) -> float:
        """Bytes of a device that a plan may use."""
        return (1 - RESERVED) * self.machine.memory

    @property
    def host(self) -> float:
        """A rank's share of the host's memory."""
        return (1 - RESERVED) * self.machine.host / self.machine.gpus


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

    def predict(self, job: Job) -> Prediction:
        """A step of this job in this way."""
        return predict(
            **vars(job.shape),
            **vars(self),
            sequence=job.sequence,
            world_size=job.gpus,
            gpus_per_node=job.machine.gpus,
            machine=job.machine,
            precision=job.precision,
        )

    @property
    def kind(self) -> str:
        """Stage and offload, in words."""
        moved = {"optimizer": self.offload_optimizer, "parameters": self.offload_param}
        off = " and ".join(name for name, place in moved.items() if place)
        groups = f" in groups of {self.group}" if self.group else ""
        return f"stage {self.stage}{groups}" + (f", {off} on the CPU" if off else "")

    def __str__(self) -> str:
        words = {"none": "no checkpointing"}
        how = words.get(self.checkpointing, f"{self.checkpointing} checkpointing")
        return f"{self.kind}; {how}; {self.accumulation} x {self.micro_batch} sequences"


def candidates(job: Job) -> Iterator[Candidate]:
    """All plans, offloads, checkpointings and micro-batches that make the batch.

    In groups: of a node's GPUs, where there are several nodes.
    """
    sizes = [size for size in (1 << i for i in range(9)) if job.each % size == 0]
    places: list[tuple[int, str | None, str | None]] = [
        (s, None, None) for s in range(4)
    ]
    places += [(stage, "cpu", None) for stage in (1, 2, 3)] + [(3, "cpu", "cpu")]
    for stage, optimizer, param in places:
        for how in ("none", "selective", "full"):
            for size in sizes:
                count = job.each // size
                yield Candidate(stage, how, size, count, optimizer, param)
    node = job.machine.gpus
    if node > 1 and job.gpus > node and job.gpus % node == 0:
        for how in ("none", "selective", "full"):
            for size in sizes:
                yield Candidate(3, how, size, job.each // size, group=node)


@dataclass(frozen=True)
class Result:
    """A candidate, what is predicted of it, and whether that fits."""

    candidate: Candidate
    prediction: Prediction
    fits: bool

    @property
    def memory(self) -> Memory:
        return self.prediction.memory


@dataclass(frozen=True)
class Choice:
    """best: the fastest that fits. others: the fastest of each other stage and
    offload that fits, and the smallest of those that do not."""

    job: Job
    best: Result
    others: list[Result]

    def loses(self, other: Result) -> float:
        """The share of its time that another plan costs more."""
        return other.prediction.step_seconds / self.best.prediction.step_seconds - 1


def choose(job: Job) -> Choice:
    """The fastest candidate that fits; ValueError if none does."""
    results = []
    for candidate in candidates(job):
        prediction = candidate.predict(job)
        memory = prediction.memory
        fits = memory.total <= job.room and memory.host <= job.host
        results.append(Result(candidate, prediction, fits))
    fitting = [r for r in results if r.fits]
    if not fitting:
        least = min(results, key=lambda r: r.memory.total)
        raise ValueError(
            f"nothing fits {job.gpus} GPUs with room for {job.room / 1e9:.1f} GB each: "
            f"{least.candidate} needs {least.memory.total / 1e9:.1f} GB, and "
            f"{least.memory.host / 1e9:.1f} of a host's {job.host / 1e9:.1f} GB; use "
            "more GPUs, or a shorter sequence"
        )
    # of two that are as fast, the one with less communication to go wrong
    fitting.sort(key=lambda r: (r.prediction.step_seconds, r.candidate.stage))
    kinds = dict.fromkeys(r.candidate.kind for r in results)
    others = []
    for kind in kinds:
        same = [r for r in fitting if r.candidate.kind == kind]
        absent = [r for r in results if r.candidate.kind == kind]
        others.append(same[0] if same else min(absent, key=lambda r: r.memory.total))
    others = [r for r in others if r.candidate.kind != fitting[0].candidate.kind]
    others.sort(key=lambda r: (not r.fits, r.prediction.step_seconds))
    return Choice(job, fitting[0], others)


def warnings(choice: Choice, result: Result) -> list[str]:
    """Sentences on what people misuse, where a result does; the best is what is used.

    Of a slow link, of offload, of accumulation, and of buckets above a shard.
    """
    job, candidate, prediction = choice.job, result.candidate, result.prediction
    best, found = choice.best, []
    waits = prediction.exposed_seconds / prediction.step_seconds
    if candidate.stage == 3 and best.candidate.stage < 3 and waits > 0.1:
        found.append(
            f"stage 3 waits {waits:.0%} of its time for the link, and stage "
            f"{best.candidate.stage} fits: parameters need not be sharded"
        )
    group = best.candidate.group
    if candidate.stage == 3 and group and not candidate.group and waits > 0.1:
        found.append(
            f"stage 3 waits {waits:.0%} of its time for the link; in groups of {group} "
            "it gathers within a node"
        )
    device = replace(candidate, offload_optimizer=None, offload_param=None)
    if candidate.offload_optimizer and candidate.checkpointing != "full":
        kept = replace(device, checkpointing="full").predict(job)
        if kept.memory.total <= job.room and (
            kept.step_seconds < prediction.step_seconds
        ):
            found.append(
                "full checkpointing makes it fit on the device, and is faster than "
                f"offload: {kept.step_seconds:.3g} s a step"
            )
    if candidate.stage == 3 and candidate.accumulation > 1:
        found.append(
            f"{candidate.accumulation} micro-batches gather all parameters "
            f"{2 * candidate.accumulation} times a step; a larger micro-batch, with "
            "checkpointing if need be, sends less"
        )
    return found


def ds_config(choice: Choice) -> dict[str, Any]:
    """The config of the best, for `minizero.initialize` or DeepSpeed.

    Buckets hold one unit, and at most a shard is set aside for them.
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


def describe(choice: Choice) -> str:
    """The plan, its reasons, the runners-up with what they lose, and warnings."""
    job, best = choice.job, choice.best
    p = best.prediction
    lines = [
        f"{job.shape.parameters / 1e9:.2f}B parameters on {job.gpus} GPUs of "
        f"{job.machine.name}, {job.sequences} sequences of {job.sequence} tokens a step",
        f"plan: {best.candidate}",
        f"  {p.step_seconds:.3g} s a step, {p.tokens_per_second_per_gpu:,.0f} tokens/s a "
        f"GPU, MFU {p.mfu:.1%}, {p.exposed_seconds / p.step_seconds:.1%} of it waiting",
        f"  {p.memory.total / 1e9:.1f} GB of {job.room / 1e9:.1f}: parameters "
        f"{p.memory.parameters / 1e9:.1f}, gradients {p.memory.gradients / 1e9:.1f}, "
        f"optimizer {p.memory.optimizer / 1e9:.1f}, activations "
        f"{p.memory.activations / 1e9:.1f}; host {p.memory.host / 1e9:.1f}",
    ]
    if best.candidate.checkpointing != "none":
        how = best.candidate.checkpointing
        lines.append(f"  in the model: {how} checkpointing of each block")
    lines.append("why not:")
    for other in choice.others:
        memory = other.memory
        if other.fits:
            what = f"takes {choice.loses(other):.1%} longer ({other.candidate})"
        elif memory.total > job.room:
            what = f"needs at least {memory.total / 1e9:.1f} GB"
        else:
            what = (
                f"needs {memory.host / 1e9:.1f} GB of {job.host / 1e9:.1f} on the host"
            )
        lines.append(f"  {other.candidate.kind}: {what}")
        if other.fits:
            lines += [f"    ({sentence})" for sentence in warnings(choice, other)]
    lines += [f"warning: {sentence}" for sentence in warnings(choice, best)]
    return "\n".join(lines)
