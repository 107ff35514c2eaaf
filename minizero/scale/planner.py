"""The plan for a model on GPUs, the reasons for it, and its config."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from ..activations import MODES
from ..memory.labels import amount
from ..memory.placement import check
from ..memory.plan import PRECISIONS
from .cost import Candidate, Costs, Job, Memory, layers_of
from .machines import MACHINES
from .predict import Prediction, predict

SAME = 0.04
"""The mean error of a prediction: steps that differ by less count as equally fast."""


def candidates(job: Job) -> Iterator[Candidate]:
    """Every stage, offload, checkpointing and micro-batch that makes the job's batch.

    On several nodes also groups of a node's GPUs (MiCS), and parameters in such groups
    alone (hpZ), with and without fewer bits.
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
        for mode in MODES:
            for size in range(1, job.sequences_per_gpu + 1):
                accumulation, rest = divmod(job.sequences_per_gpu, size)
                if rest == 0:
                    yield Candidate(
                        checkpointing=mode, micro_batch=size,
                        accumulation=accumulation, **place,
                    )  # fmt: skip


def simplicity(plan: Prediction) -> tuple[int, int, float]:
    """What to sort plans by that are equally fast: options, stage, then seconds."""
    return plan.candidate.extras, plan.candidate.stage, plan.step_seconds


@dataclass(frozen=True)
class Choice:
    """What `choose` found. best: the plan. others: the fastest of each other kind that
    fits, then the smallest of each kind that does not."""

    job: Job
    best: Prediction
    others: list[Prediction]

    def slowdown(self, other: Prediction) -> float:
        """By which share of the best plan's time another plan takes longer."""
        return other.step_seconds / self.best.step_seconds - 1


def best_of(job: Job, kind: list[Candidate]) -> Prediction:
    """The fastest of these candidates that fits; the smallest, if none does.

    What computes for longer than the fastest step so far is not predicted.
    """
    sizes = {candidate: Memory.of(job, candidate) for candidate in kind}
    fitting = [candidate for candidate in kind if sizes[candidate].fits(job)]
    if not fitting:
        return predict(job, min(kind, key=lambda c: sizes[c].total))
    computing = {}  # seconds, a lower bound of the step's
    for how in fitting:
        units = layers_of(Costs(job, how.micro_batch * job.sequence), how, 0.0)
        seconds = sum(unit.forward + unit.backward for unit in units)
        computing[how] = how.accumulation * seconds
    first, *others = sorted(fitting, key=computing.__getitem__)
    best = predict(job, first)
    for other in others:
        if computing[other] < best.step_seconds:
            best = min(best, predict(job, other), key=lambda p: p.step_seconds)
    return best


def choose(job: Job, among: Iterable[Candidate] | None = None) -> Choice:
    """The lowest stage that fits, if possible without offload and groups.

    Of those that the fastest beats by at most `SAME`, the error of a prediction, it takes
    the one with the fewest options, then of the lowest stage, then the fastest.

    among: the candidates (default: all). ValueError if none fits.
    """
    check("precision", job.precision, PRECISIONS)  # a config has no fp8
    kinds: dict[str, list[Candidate]] = {}
    for candidate in candidates(job) if among is None else among:
        kinds.setdefault(candidate.kind, []).append(candidate)
    found = [best_of(job, kind) for kind in kinds.values()]
    found.sort(key=lambda p: p.step_seconds if p.fits else inf)
    allowed = [p for p in found if job.allows(p.candidate)]
    if not (allowed and allowed[0].fits):
        least = min(allowed, key=lambda p: max(
            p.memory.total / job.device_bytes, p.memory.host / job.host_bytes
        ))  # fmt: skip
        raise ValueError(
            f"nothing fits {job.gpus} GPUs with room for {amount(job.device_bytes)} "
            f"each: {least.candidate} needs {amount(least.memory.total)}, and "
            f"{amount(least.memory.host)} of {amount(job.host_bytes)} of the host; use "
            "more GPUs, or a shorter sequence"
        )
    longest = (1 + SAME) * allowed[0].step_seconds
    equals = (p for p in allowed if p.fits and p.step_seconds <= longest)
    best = min(equals, key=simplicity)
    return Choice(job, best, [p for p in found if p is not best])


def ds_config(job: Job, how: Candidate) -> dict[str, Any]:
    """The config of a candidate, for `minizero.initialize` or DeepSpeed.

    A bucket holds the largest unit, which is unsharded once in any case, and no more;
    one block is gathered ahead.
    The section "minizero_plan", which both ignore, says what else the plan assumes:
    the GPUs, their machine, the sequence, and what the model recomputes.
    """
    shape = job.shape
    positions = 0 if shape.gated else job.sequence * shape.hidden  # learned ones
    step = 32 * job.gpus  # a padded unit has a multiple of so many elements
    root, block = (-(-n // step) * step for n in (shape.root + positions, shape.block))
    unit, live = max(root, block), root + 2 * block
    zero: dict[str, Any] = {
        "stage": how.stage,
        "overlap_comm": True,
        "reduce_bucket_size": min(unit, 500_000_000),
    }
    if how.stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": unit,
            "stage3_max_live_parameters": live,
            "stage3_param_persistence_threshold": 0,
        }
    if how.group:
        zero["mics_shard_size"] = how.group
    if how.secondary:
        zero["zero_hpz_partition_size"] = how.secondary
    if how.weight_bits:
        zero |= {"zero_quantized_weights": True, "zero_quantized_gradients": True}
    for name in ("offload_optimizer", "offload_param"):
        if place := getattr(how, name):
            zero[name] = {"device": place, "pin_memory": True}
    machine = next((k for k, m in MACHINES.items() if m == job.machine), None)
    return {
        "train_micro_batch_size_per_gpu": how.micro_batch,
        "gradient_accumulation_steps": how.accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
        **({} if job.precision == "fp32" else {job.precision: {"enabled": True}}),
        "zero_optimization": zero,
        "minizero_plan": {
            "gpus": job.gpus,
            "sequence": job.sequence,
            "checkpointing": how.checkpointing,
            **({"machine": machine} if machine else {}),
        },
    }


def _reason(choice: Choice) -> str:
    """Why the rule chose this plan: the lowest stage that fits, or one that is faster."""
    every = choice.best, *choice.others
    fitting = [p for p in every if p.fits and choice.job.allows(p.candidate)]
    lowest = min(fitting, key=simplicity)
    if lowest is choice.best:
        return f"the lowest stage that fits: no plan is faster by more than {SAME:.0%}"
    more = lowest.step_seconds / min(p.step_seconds for p in fitting) - 1
    return f"{lowest.candidate.kind} fits too, {more:.1%} slower than the fastest plan"


def describe(choice: Choice) -> str:
    """The plan, the reason why it was chosen, and what the others would cost."""
    job, best, memory = choice.job, choice.best, choice.best.memory
    count, mode = job.shape.parameters, best.candidate.checkpointing
    size = f"{count / 1e9:.3g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"
    parts = ("parameters", "gradients", "optimizer", "activations", "host")
    lines = [
        f"{size} parameters on {job.gpus} GPUs of {job.machine.name}, "
        f"{job.sequences} sequences of {job.sequence} tokens a step: "
        f"{job.sequences * job.sequence:,}",
        f"plan: {best.candidate}",
        f"  {best.step_seconds:.3g} s a step, {best.tokens_per_second_per_gpu:,.0f} "
        f"tokens/s a GPU, MFU {best.mfu:.1%}, "
        f"{best.exposed_seconds / best.step_seconds:.1%} of it waiting",
        f"  {amount(memory.total)} of {amount(job.device_bytes)}: "
        + ", ".join(f"{name} {amount(getattr(memory, name))}" for name in parts),
        f"  {_reason(choice)}",
    ]
    if mode != "none":
        lines.append(f'  in the model: recompute_units(model, "{mode}")')
    lines.append("the other kinds of plan:")
    for other in choice.others:
        more, needs = choice.slowdown(other), other.memory
        if other.fits:
            what = f"{abs(more):.1%} {'slower' if more >= 0 else 'faster'}"
            what += f" ({other.candidate.batching})"
        elif needs.total > job.device_bytes:
            what = f"needs {amount(needs.total)} of {amount(job.device_bytes)}"
        else:
            what = f"needs {amount(needs.host)} of {amount(job.host_bytes)} on the host"
        lines.append(f"  {other.candidate.kind}: {what}")
        if other.fits and not job.allows(other.candidate):
            lines.append("    (it rounds what is sent, so losses change: --quantize)")
    return "\n".join(lines)
