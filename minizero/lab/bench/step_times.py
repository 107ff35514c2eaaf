"""Steps timed on real ranks, fitted, and drawn beside simulated ones.

A step is timed on each rank with its ledger. What lies between the calls is
computation, so one step without overlap gives the compute times that
`minizero.overlap.simulator.simulate` needs, and collectives alone give the link.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from minizero import comm
from minizero.comm.ledger import Call
from minizero.overlap.machine import Buffer, Interval, Layer, Machine
from minizero.overlap.prefetch import exposed
from minizero.ranks.launch import world_size
from minizero.zero.data_parallel import DataParallel


@dataclass
class Step:
    """One step of one rank; times in seconds of `perf_counter`."""

    begin: float
    forward_end: float
    backward_end: float
    end: float
    calls: list[Call]

    @property
    def duration(self) -> float:
        return self.end - self.begin

    @property
    def exposed(self) -> float:
        return exposed(self.calls)

    def intervals(self) -> list[Interval]:
        """As the simulator gives them: a lane of what the rank does, and one of calls.

        A call's interval ends when its wait does: when it really arrived, nobody
        notes.
        """
        lanes = []
        spent = sorted(
            (begin, end, what, c.unit)
            for c in self.calls
            for what, begin, end in (
                ("launch", c.launched, c.returned),
                ("wait", c.waited, c.finished),
            )
        )
        phases = (
            ("forward", self.begin, self.forward_end),
            ("backward", self.forward_end, self.backward_end),
            ("update", self.backward_end, self.end),
        )
        for phase, begin, end in phases:
            now = begin
            for since, until, what, unit in spent:
                if begin <= since < end:
                    lanes.append(Interval("compute", phase, "", now, since))
                    lanes.append(Interval("compute", what, unit, since, until))
                    now = until
            lanes.append(Interval("compute", phase, "", now, end))
        lanes += [
            Interval("link", c.op, c.unit, c.launched, c.finished) for c in self.calls
        ]
        for lane in lanes:
            lane.begin -= self.begin
            lane.end -= self.begin
        return lanes


def timed_step(net: DataParallel, x: Tensor, y: Tensor) -> Step:
    """Forward, backward and update of one batch, after a barrier."""
    comm.barrier()
    with comm.ledger() as calls:
        begin = time.perf_counter()
        loss = net(x, y)
        forward_end = time.perf_counter()
        net.backward(loss)
        backward_end = time.perf_counter()
        net.step()
        end = time.perf_counter()
    return Step(begin, forward_end, backward_end, end, list(calls))


def typical(steps: Sequence[Step]) -> list[Step]:
    """The third of the steps that lies about the median duration.

    Their means add up to a typical step, where medians of parts would not: another
    program's turn on a core makes few parts much longer, but some part of every step.
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
    key = (first.phase, first.unit)
    gaps[key] += first.launched - step.begin
    return gaps


def fit_link(runs: Sequence[Sequence[Step]], ranks: int) -> Machine:
    """The link, from runs of ZeRO-3 without overlap; contention is left at 0.

    Least squares over all calls, so that their times add up to what was measured:
    the time to launch one and the time to wait for an all-gather are straight lines
    over the bytes sent; what a reduce-scatter is waited for beyond that is summing.
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
