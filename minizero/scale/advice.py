"""A plan in words: its reasons, what others lose, and what people misuse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..config.read import read
from ..config.source import Source
from ..memory.labels import amount
from .candidates import KEPT, Candidate, Job
from .planner import Choice, Result

WAITS = 0.1
"""The share of a step in waits above which a link is slow."""


def warnings(choice: Choice, found: Result) -> Iterator[str]:
    """Sentences on what a result misuses: a slow link, offload, accumulation."""
    candidate = found.candidate
    yield from avoidable(choice, found)
    if candidate.stage == 3 and candidate.accumulation > 1:
        count = candidate.accumulation
        yield (
            f"{count} micro-batches gather all parameters {2 * count} times a step; a "
            "larger micro-batch, with checkpointing if need be, sends less"
        )


def avoidable(choice: Choice, found: Result) -> Iterator[str]:
    """Of waits for a slow link, and of offload that checkpointing makes needless."""
    job, candidate, prediction = choice.job, found.candidate, found.prediction
    best = choice.best.candidate
    waits = prediction.exposed_seconds / prediction.step_seconds
    if candidate.stage == 3 and waits > WAITS:
        if best.stage < 3:
            yield (
                f"stage 3 waits {waits:.0%} of its time for the link, and {best.kind} "
                "fits: parameters need not be sharded"
            )
        elif (size := best.group or best.secondary) and not (
            candidate.group or candidate.secondary
        ):
            yield (
                f"stage 3 waits {waits:.0%} of its time for the link; in groups of "
                f"{size} it gathers within a node"
            )
    if candidate.offload_optimizer:
        device = replace(candidate, offload_optimizer=None, offload_param=None)
        ways = [Result(job, replace(device, checkpointing=how)) for how in KEPT]
        fitting = [r for r in ways if r.fits]
        least = min(fitting, key=lambda r: r.prediction.step_seconds, default=found)
        if least.prediction.step_seconds < prediction.step_seconds:
            yield (
                f"with {least.candidate.how.split(';')[0]} it fits on the device, and is "
                f"faster than with offload: {least.prediction.step_seconds:.3g} s a step"
            )


def large_buckets(job: Job, config: Source) -> Iterator[str]:
    """A sentence for each bucket of a config that is larger than it can be of use.

    A unit's gradients are whole once in any case; what is more than that, and more than
    a rank's shard of the model, holds back what sharding has freed.
    """
    zero = read(config, job.gpus).zero_optimization
    unit, shard = max(job.shape.block, job.shape.root), job.shape.parameters // job.gpus
    names = ["reduce_bucket_size"]
    names += ["stage3_prefetch_bucket_size"] * (zero.stage == 3)
    for name in names:
        size = getattr(zero, name)
        if zero.stage > 1 and size > max(unit, shard):
            wide = 4 if job.precision == "fp32" else 2
            yield (
                f"{name} = {size:,} elements holds {amount(wide * size)}, and a rank's "
                f"shard of the model has {amount(wide * shard)}; the largest unit has "
                f"{unit:,} elements: a bucket of that size is enough"
            )


def candidate_of(job: Job, config: Source) -> Candidate:
    """The candidate that a `ds_config.json` describes, without checkpointing."""
    found = read(config, job.gpus)
    zero, (together, secondary) = found.zero_optimization, found.groups
    optimizer, param = (None if on == "none" else on for on in found.places)
    weights, gradients = found.bits
    return Candidate(
        zero.stage, "none", found.train_micro_batch_size_per_gpu,
        found.gradient_accumulation_steps, optimizer, param, together, secondary,
        weights, gradients,
    )  # fmt: skip


def judge(choice: Choice, config: Source) -> str:
    """A `ds_config.json` of your own against the best, and what it misuses.

    It does not say what the model recomputes: the fastest that fits is taken.
    """
    job = choice.job
    ways = [
        Result(job, replace(candidate_of(job, config), checkpointing=how))
        for how in KEPT
    ]
    fitting = [r for r in ways if r.fits] or ways[-1:]
    mine = min(fitting, key=lambda r: r.prediction.step_seconds)
    p, tokens = mine.prediction, choice.best.prediction.tokens_per_second_per_gpu
    lines = [
        f"yours: {mine.candidate}",
        f"  {p.tokens_per_second_per_gpu:,.0f} tokens/s a GPU, "
        f"{tokens / p.tokens_per_second_per_gpu - 1:+.1%} with the plan; "
        + fit(job, mine),
    ]
    said = [*warnings(choice, mine), *large_buckets(job, config)]
    return "\n".join(lines + [f"  warning: {sentence}" for sentence in said])


def fit(job: Job, found: Result) -> str:
    """Whether it fits, in words."""
    memory = found.memory
    asked = ", rehearsed" if found.unsure else ""
    if found.fits:
        return f"{amount(found.needs)} of {amount(job.room)}{asked}"
    if found.needs > job.room:
        return f"needs at least {amount(found.needs)} of {amount(job.room)}{asked}"
    return f"needs {amount(memory.host)} of {amount(job.host)} on the host"


def describe(choice: Choice) -> str:
    """The plan, its reasons, the runners-up with what they lose, and warnings."""
    job, best = choice.job, choice.best
    p, memory = best.prediction, best.memory
    count = job.shape.parameters
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    parts = ("parameters", "gradients", "optimizer", "activations", "host")
    lines = [
        f"{size} parameters on {job.gpus} GPUs of {job.machine.name}, "
        f"{job.sequences} sequences of {job.sequence} tokens a step: "
        f"{job.sequences * job.sequence:,}",
        f"plan: {best.candidate}",
        f"  {p.step_seconds:.3g} s a step, {p.tokens_per_second_per_gpu:,.0f} tokens/s a "
        f"GPU, MFU {p.mfu:.1%}, {p.exposed_seconds / p.step_seconds:.1%} of it waiting",
        f"  {fit(job, best)}: "
        + ", ".join(f"{name} {amount(getattr(memory, name))}" for name in parts),
    ]
    if (how := best.candidate.recompute) != "none":
        lines.append(f'  in the model: recompute_units(model, "{how}")')
    lines.append("why not:")
    for other in choice.others:
        what = fit(job, other)
        if other.fits:
            loses = choice.loses(other)
            what = f"takes {abs(loses):.1%} {'longer' if loses >= 0 else 'less'}"
            what += f" ({other.candidate.how})"
        lines.append(f"  {other.candidate.kind}: {what}")
        if other.fits and other.candidate.weight_bits and not job.quantize:
            lines.append("    (it rounds what is sent, so losses change: --quantize)")
        if other.fits:
            lines += [f"    ({sentence})" for sentence in avoidable(choice, other)]
    lines += [f"warning: {sentence}" for sentence in warnings(choice, best)]
    return "\n".join(lines)
