"""Chapter 8: exposed communication, and steps predicted by the simulator.

Two gloo ranks with one thread each train small GPTs, turn by turn. The simulator's
figures come from `FITTED`; the runs in `PREDICTED` are none of these: other depths,
buckets, limits and plans.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch

from minizero.lab.bench.runner import Comparison, interleaved
from minizero.lab.bench.step_times import (
    Step,
    fit_contention,
    fit_link,
    layers_of,
    timed_step,
)
from minizero.lab.models.gpt import GPT, GPTConfig, decay_groups
from minizero.memory.plan import Plan
from minizero.overlap.machine import Layer, Machine, Timeline
from minizero.overlap.prefetch import Overlap
from minizero.overlap.simulator import simulate
from minizero.ranks.launch import Pool
from minizero.zero.data_parallel import DataParallel
from minizero.zero.interfaces import Schedule
from minizero.zero.parallelize import parallelize

RANKS = 2
WHOLE = 10**9  # a bucket as large as any unit


@dataclass(frozen=True)
class Run:
    """A model and how it is trained; `overlap` None waits at once."""

    model: GPTConfig
    stage: int = 3
    overlap: dict[str, int] | None = None
    bucket_size: int = WHOLE

    def schedule(self) -> Schedule:
        return Schedule() if self.overlap is None else Overlap(**self.overlap)


SMALL = GPTConfig(layers=4, hidden=192, heads=4, sequence=64)
DEEP = GPTConfig(layers=8, hidden=192, heads=4, sequence=64)
WIDE = GPTConfig(layers=4, hidden=256, heads=4, sequence=128)
AHEAD = {"param_persistence_threshold": 0}

FITTED = {
    "small, at once": Run(SMALL),
    "wide, at once": Run(WIDE),
    "small, overlapped": Run(SMALL, overlap=AHEAD),
}
PREDICTED = {
    "8 layers, at once": Run(DEEP),
    "8 layers, overlapped": Run(DEEP, overlap=AHEAD),
    "wide, overlapped": Run(WIDE, overlap=AHEAD),
    "buckets of 100,000": Run(SMALL, overlap=AHEAD, bucket_size=100_000),
    "one block ahead": Run(SMALL, overlap=AHEAD | {"prefetch_bucket_size": 500_000}),
    "everything kept": Run(SMALL, overlap={"param_persistence_threshold": WHOLE}),
    "ZeRO-2, at once": Run(SMALL, stage=2),
    "ZeRO-2, overlapped": Run(SMALL, stage=2, overlap=AHEAD),
}

_nets: dict[str, DataParallel] = {}  # of this rank, between turns


def build(run: Run) -> DataParallel:
    """The net of a run, on this rank, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(run.model)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.1), fused=True)
    return parallelize(
        model,
        optimizer,
        Plan.stage(run.stage),
        schedule=run.schedule(),
        bucket_size=run.bucket_size,
    )


def turn(name: str, run: Run, steps: int) -> list[Step]:
    """Some steps of a run on this rank; its net is kept for the next turn."""
    if name not in _nets:
        _nets[name] = build(run)
        turn(name, run, 2)
    x = torch.zeros(1, run.model.sequence, dtype=torch.int64)
    gc.collect()
    return [timed_step(_nets[name], x, x) for _ in range(steps)]


@dataclass
class Measured:
    """The steps of each run, on rank 0, and what they say of the units."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    layers: dict[GPTConfig, list[Layer]] = field(default_factory=dict)

    def duration(self, name: str) -> float:
        return median(step.duration for step in self.steps[name])


def layers(name: str, steps: list[Step]) -> list[Layer]:
    """Compute times of the units of a run, on the rank that has its net."""
    return layers_of(_nets[name], steps)


def measure(runs: dict[str, Run], repeats: int, steps: int = 5) -> Measured:
    """Train all runs turn by turn."""
    seen = Measured()
    with Pool(RANKS) as pool:

        def case(name: str) -> float:
            found: list[Step] = pool.run(turn, name, runs[name], steps)[0]
            seen.steps.setdefault(name, []).extend(found)
            return median(step.duration for step in found)

        interleaved({name: partial(case, name) for name in runs}, repeats)
        for name in ("small, at once", "wide, at once"):
            found = pool.run(layers, name, seen.steps[name])[0]
            seen.layers[runs[name].model] = found
    return seen


def fit(seen: Measured) -> Machine:
    """The machine, from the runs in `FITTED`."""
    at_once = [seen.steps[name] for name in ("small, at once", "wide, at once")]
    machine = fit_link(at_once, RANKS)
    run = FITTED["small, overlapped"]
    return fit_contention(
        machine,
        lambda m: predict(seen, m, run).duration,
        seen.duration("small, overlapped"),
    )


def predict(seen: Measured, machine: Machine, run: Run) -> Timeline:
    """One simulated step of a run; more blocks are more of the same."""
    known = seen.layers.get(run.model)
    if known is None:
        root, *blocks = seen.layers[SMALL]
        known = [root, *(blocks[i % len(blocks)] for i in range(run.model.layers))]
    units = [
        Layer(f"{i} {u.name}", u.flats, u.forward, u.backward, u.update)
        for i, u in enumerate(known)
    ]
    plan = Plan.stage(run.stage)
    return simulate(units, machine, plan, run.schedule(), run.bucket_size)


def compare(repeats: int) -> list[Comparison]:
    """Exposed communication with and without; predicted against measured steps."""
    seen = measure(FITTED | PREDICTED, repeats)
    with_, without = (
        [step.exposed for step in seen.steps[f"small, {how}"]]
        for how in ("overlapped", "at once")
    )
    results = [
        Comparison(
            "exposed communication of ZeRO-3",
            "s",
            "overlapped",
            "at once",
            with_,
            without,
            at_most=1.0,
        )
    ]
    machine = fit(seen)
    for name, run in PREDICTED.items():
        measured = [step.duration for step in seen.steps[name]]
        predicted = [predict(seen, machine, run).duration] * len(measured)
        results.append(
            Comparison(
                f"step time: {name}",
                "s",
                "simulated",
                "measured",
                predicted,
                measured,
                at_least=0.85,
                at_most=1.15,
            )
        )
    return results
