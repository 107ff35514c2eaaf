"""The simulator's figures, fitted to steps timed on real ranks.

A step without overlap gives the compute times of the units that
`minizero.overlap.simulator.simulate` needs, and its calls give the speed of the link.

`FITTED` are the runs that the figures are fitted to; those in `PREDICTED` have other
depths, buckets, limits and stages. All are small GPTs on two ranks of one thread each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

import torch

from minizero.lab.measure import Step, timed_step
from minizero.lab.models.gpt import GPT, GPTConfig, decay_groups
from minizero.memory.plan import Plan
from minizero.overlap import Overlap
from minizero.overlap.simulator import Buffer, Layer, Machine, Timeline, simulate
from minizero.ranks import Pool, world_size
from minizero.zero import DataParallel, Schedule
from minizero.zero.parallelize import parallelize

RANKS = 2
WHOLE = 10**9  # a bucket as large as any unit


def typical(steps: Sequence[Step]) -> list[Step]:
    """The middle third of the steps, by duration.

    The mean times of their parts add up to a typical step. Medians of parts would not:
    another program's turn on a core lengthens few parts, but some part of every step.
    """
    ranked = sorted(steps, key=lambda step: step.duration)
    edge = len(ranked) // 3
    return ranked[edge : len(ranked) - edge]


def layers_of(net: DataParallel, steps: Sequence[Step]) -> list[Layer]:
    """The units with their compute times, from steps of ZeRO-3 without overlap.

    Each call is waited for at once there, and the gap after it belongs to the unit
    that was gathered. The last block's forward and the root's share one gap; the
    block gets as much of it as the others took.
    """
    chosen = typical(steps)
    gaps = [_gaps(step) for step in chosen]
    times = {key: fmean(gap[key] for gap in gaps) for key in gaps[0]}
    root, *blocks = (unit.name for unit in net.units)
    last = times["forward", blocks[-1]]
    usual = fmean(times["forward", name] for name in blocks[:-1])
    times["forward", blocks[-1]] = min(usual, last)
    times["forward", root] += max(0.0, last - usual)
    update = fmean(step.end - step.backward_end for step in chosen) * world_size()
    elements = sum(f.padded for unit in net.units for f in unit.trainable)
    return [
        Layer(
            unit.name,
            [Buffer(f.padded, f.full.itemsize, f.trainable) for f in unit.flats],
            times["forward", unit.name],
            times["backward", unit.name],
            update * sum(f.padded for f in unit.trainable) / elements,
        )
        for unit in net.units
    ]


def _gaps(step: Step) -> dict[tuple[str, str], float]:
    """Seconds between calls, by phase and the unit gathered before."""
    gaps: dict[tuple[str, str], float] = {}
    ends = {"forward": step.forward_end, "backward": step.backward_end}
    for i, call in enumerate(step.calls):
        if call.phase not in ends:
            continue
        after = step.calls[i + 1 : i + 2]
        same = after and after[0].phase == call.phase
        until = after[0].launched if same else ends[call.phase]
        key = (call.phase, call.unit)
        gaps[key] = gaps.get(key, 0.0) + until - call.finished
    first = step.calls[0]
    gaps[first.phase, first.unit] += first.launched - step.begin
    return gaps


def fit_link(runs: Sequence[Sequence[Step]], ranks: int) -> Machine:
    """The link, from runs of ZeRO-3 without overlap; contention is left at 0.

    Least squares over all calls, so that their times add up to what was measured. The
    time to launch a call and the time to wait for an all-gather are straight lines
    over the bytes sent; a reduce-scatter waits longer, because it also adds.
    """
    calls = [c for run in runs for step in typical(run) for c in step.calls]
    gathers = [c for c in calls if c.op == "all_gather"]
    reduces = [c for c in calls if c.op == "reduce_scatter"]
    handling, copying = _line([(c.bytes, c.waited - c.launched) for c in calls])
    latency, moving = _line([(c.bytes, c.finished - c.waited) for c in gathers])
    beyond = sum(c.finished - c.waited - latency - c.bytes * moving for c in reduces)
    adding = max(beyond / sum(c.bytes for c in reduces), 1e-15)
    return Machine(
        ranks, latency, 1 / moving, handling, copying=1 / copying, adding=1 / adding
    )


def fit_contention(
    machine: Machine, predict: Callable[[Machine], float], measured: float
) -> Machine:
    """The machine whose contention gives the measured duration, or comes nearest."""
    machines = [replace(machine, contention=k / 50) for k in range(45)]
    return min(machines, key=lambda m: abs(predict(m) - measured))


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Offset and slope, neither below 0."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    away = x - x.mean()
    slope = max(float(away @ y / (away @ away)), 0.0)
    offset = float(y.mean()) - slope * float(x.mean())
    if offset < 0:
        offset, slope = 0.0, float(y.mean() / x.mean())
    return offset, max(slope, 1e-15)


@dataclass(frozen=True)
class Run:
    """A model and how it is trained; `overlap` None waits for each call at once."""

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
AT_ONCE = ("small, at once", "wide, at once")

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

_nets: dict[str, DataParallel] = {}  # on each rank, kept between turns


def _turn(name: str, run: Run, steps: int) -> list[Step]:
    """Some steps of a run on this rank; its net is built, and warmed up, once."""
    x = torch.zeros(1, run.model.sequence, dtype=torch.int64)
    if name not in _nets:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = GPT(run.model)
        optimizer = torch.optim.AdamW(decay_groups(model, 0.1), fused=True)
        plan, schedule = Plan.stage(run.stage), run.schedule()
        _nets[name] = parallelize(
            model, optimizer, plan, schedule=schedule, bucket_size=run.bucket_size
        )
        for _ in range(2):
            timed_step(_nets[name], x, x)
    gc.collect()
    return [timed_step(_nets[name], x, x) for _ in range(steps)]


def _layers(name: str, steps: list[Step]) -> list[Layer]:
    return layers_of(_nets[name], steps)


@dataclass
class Measured:
    """The steps of each run on rank 0, and the units of the runs without overlap."""

    steps: dict[str, list[Step]] = field(default_factory=dict)
    layers: dict[GPTConfig, list[Layer]] = field(default_factory=dict)

    def duration(self, name: str) -> float:
        return median(step.duration for step in self.steps[name])


def measure(runs: Mapping[str, Run], repeats: int, steps: int = 5) -> Measured:
    """Train all runs turn by turn: some steps of each, `repeats` times, after one turn
    that is not counted."""
    seen = Measured()
    with Pool(RANKS) as pool:
        for turn in range(repeats + 1):
            for name, run in runs.items():
                found = pool.run(_turn, name, run, steps)[0]
                if turn:
                    seen.steps.setdefault(name, []).extend(found)
        for name in AT_ONCE:
            found = pool.run(_layers, name, seen.steps[name])[0]
            seen.layers[runs[name].model] = found
    return seen


def fit(seen: Measured) -> Machine:
    """The machine, from the runs in `FITTED`."""
    machine = fit_link([seen.steps[name] for name in AT_ONCE], RANKS)
    name = "small, overlapped"
    return fit_contention(
        machine,
        lambda m: predict(seen, m, FITTED[name]).duration,
        seen.duration(name),
    )


def predict(seen: Measured, machine: Machine, run: Run) -> Timeline:
    """One simulated step of a run; a deeper model has more blocks of the same kind."""
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
