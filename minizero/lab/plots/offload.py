"""Offload: what crosses the bus and the disk, when, and what is lost by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.lab.hardware import efficiency, intensity
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    DASHES,
    GREY,
    LINES,
    STYLE,
    WIDTH,
    ink,
    line,
    name_rows,
    single,
)
from minizero.memory.plan import PRECISIONS, Plan
from minizero.offload.swap_file import SwapFile, Transfer, aligned_buffer
from minizero.overlap.simulator import Interval


def crossing(
    plan: Plan, precision: str = "fp32", micro_batches: int = 1
) -> tuple[int, int]:
    """Bytes a sharded parameter that cross the bus in a step: (down, up).

    Down is to the host. Every micro-batch sends its gradients to their storage and
    fetches parameters twice, for forward and for backward. The update fetches what is
    stored apart from the optimizer's states: gradients, and parameters where there are
    no master weights. Updated parameters go back to their storage.
    """
    parameter, gradient, master = PRECISIONS[precision]
    away = {
        name: getattr(plan, name).on != plan.optimizer.on
        for name in ("parameters", "gradients")
    }
    inward = gradient * away["gradients"]
    inward += parameter * (away["parameters"] and not master)
    outward = parameter * away["parameters"]
    down = micro_batches * gradient * (plan.gradients.on != "device")
    up = micro_batches * 2 * parameter * (plan.parameters.on != "device")
    if plan.optimizer.on == "device":
        return down + outward, up + inward
    return down + inward, up + outward


ROUND = ("in", "update", "out")
"""What happens to a unit on the host, in this order."""

IN, OUT = CATEGORY_COLOURS["gradients"], CATEGORY_COLOURS["parameters"]
UPDATE = CATEGORY_COLOURS["optimizer"]
LANES = {"in": IN, "read": IN, "update": UPDATE, "out": OUT, "write": OUT}
"""The colour of each lane; with a disk, units are read and written."""


def rounds(
    units: Mapping[str, Sequence[float]], pipelined: bool = True
) -> list[Interval]:
    """When each unit comes in, is updated and goes out.

    units: seconds of the three, by unit. Pipelined, in(i+1), update(i) and out(i-1)
    run at once: a lane does one thing at a time, a unit goes through its three in
    order, and one comes in when the one before the last is out of its block. Else
    everything follows everything.
    """
    bars: list[Interval] = []
    free = dict.fromkeys(ROUND, 0.0)
    gone = [0.0, 0.0]  # when the last but one unit, and the last, are out
    for unit, seconds in units.items():
        now = gone[0]
        for lane, taken in zip(ROUND, seconds, strict=True):
            start = max(now, free[lane]) if pipelined else max(now, gone[1])
            now = free[lane] = start + taken
            bars.append(Interval(lane, lane, unit, start, now))
        gone = [gone[1], now]
    return bars


def throughput(
    folder: Path, nbytes: int, block_size: int, queue_depth: int
) -> tuple[float, float]:
    """Bytes a second of one write and of one read of a file: (write, read)."""
    swap = SwapFile(folder, block_size, queue_depth)
    at, buffer = swap.allocate(nbytes), aligned_buffer(nbytes)
    buffer.random_()
    rates = []
    for transfer in (swap.write, swap.write, swap.read):
        start = time.perf_counter()
        transfer(at, buffer).synchronize()
        rates.append(nbytes / (time.perf_counter() - start))
    swap.close()
    return rates[1], rates[2]  # the first write found its blocks empty


@rc_context(STYLE)
def depth_figure(rates: Mapping[int, tuple[float, float]]) -> Figure:
    """Throughput by the number of requests in flight.

    rates: by queue depth, bytes a second written and read.
    """
    figure, axes = single(2.6)
    for i, name in enumerate(("write", "read")):
        values = [pair[i] / 1e9 for pair in rates.values()]
        look = {"color": LINES[2 * i], "linestyle": DASHES[i], "marker": "o"}
        axes.plot(range(len(rates)), values, label=name, **look)
    axes.set_xticks(range(len(rates)), [str(depth) for depth in rates])
    axes.set(xlabel="requests in flight", ylabel="GB/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return figure


def watched_step(net: Any) -> list[Interval]:
    """Let a net step whose state is on disk; a bar for each read, update and write.

    The update of a slice needs as many reads, and as many writes, as that of any other.
    """
    bars, storage = [], net.storage
    transfers: dict[str, list[Transfer]] = {"read": [], "write": []}
    names = {flat: unit.name for unit in net.units for flat in unit.flats}
    units: list[str] = []

    def noted(lane: str, launch: Callable[..., Transfer]) -> Callable[..., Transfer]:
        def call(*arguments: Any) -> Transfer:
            transfers[lane].append(launch(*arguments))
            return transfers[lane][-1]

        return call

    def step(flats: Any, *rest: Any) -> None:
        start = time.perf_counter()
        type(storage).step(storage, flats, *rest)
        units.append(names[flats[0]])
        bars.append(Interval("update", "update", units[-1], start, time.perf_counter()))

    with (
        mock.patch.object(storage, "step", step),
        mock.patch.object(storage.swap, "read", noted("read", storage.swap.read)),
        mock.patch.object(storage.swap, "write", noted("write", storage.swap.write)),
    ):
        net.step()
    for lane, found in transfers.items():
        each = -(-len(found) // len(units)) or 1  # transfers of a slice
        for i in range(0, len(found), each):
            ended = max(transfer.finished for transfer in found[i : i + each])
            bars.append(Interval(lane, lane, units[i // each], found[i].started, ended))
    return bars


@rc_context(STYLE)
def lanes_figure(runs: Mapping[str, Sequence[Interval]]) -> Figure:
    """A panel for each run, and in it three lanes, in milliseconds.

    A bar has the last part of its unit's name where that fits. runs: intervals by
    label, in seconds.
    """
    seen = {interval.lane for run in runs.values() for interval in run}
    colours = {lane: colour for lane, colour in LANES.items() if lane in seen}
    start = {name: min(i.begin for i in run) for name, run in runs.items()}
    took = {name: max(i.end for i in run) - start[name] for name, run in runs.items()}
    longest = 1e3 * max(took.values())
    figure = Figure(figsize=(WIDTH, 0.7 + 1.05 * len(runs)))
    panels = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        for piece in run:
            later = [i.begin for i in run if i.lane == piece.lane]
            end = min([piece.end, *(x for x in later if x > piece.begin)])  # is seen
            width, y = 1e3 * (end - piece.begin), list(colours).index(piece.lane)
            left, face = 1e3 * (piece.begin - start[name]), colours[piece.lane]
            edge: Any = {"edgecolor": GREY, "linewidth": 0.6}
            axes.barh(y, width, 0.8, left, color=face, **edge)
            text = piece.unit.rpartition(".")[2]
            text = text if len(text) + 1 < 85 * width / longest else ""
            look = {"ha": "center", "va": "center", "color": ink(face)}
            axes.text(left + width / 2, y, text, fontsize=8.5, **look)
        ms = 1e3 * took[name]
        title = f"{name}: {ms:{'.3g' if ms < 1000 else '.0f'}} ms"
        axes.set_title(title, loc="left", fontsize=9.5, color=GREY)
        name_rows(axes, colours)
        axes.set_xlim(0, longest)
    panels[-1].set_xlabel("milliseconds")
    return figure


@rc_context(STYLE)
def efficiency_figure(
    peak: float, sequence: int = 1024, batches: Sequence[int] = (1, 4, 16, 64)
) -> Figure:
    """Efficiency against the bandwidth a GPU has to where the state is stored.

    peak: operations a second. batches: sequences a GPU, a curve each.
    """
    figure = Figure(figsize=(WIDTH, 2.9))
    bandwidths = [10 ** (8 + i / 20) for i in range(101)]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, what in zip(panels, ("parameters", "optimizer"), strict=True):
        for i, batch in enumerate(batches):
            ait = intensity(what, sequence, batch)
            shares = [100 * efficiency(ait, b, peak) for b in bandwidths]
            axes.plot([b / 1e9 for b in bandwidths], shares, label=batch, **line(i))
        axes.set_xscale("log")
        axes.set(ylim=(0, 100), xlim=(0.1, 1e4), xlabel="GB/s")
        axes.set_title(what, fontsize=9.5, color=GREY)
    panels[0].set_ylabel("efficiency, %")
    figure.legend(
        *axes.get_legend_handles_labels(),
        title="sequences a GPU",
        loc="outside upper center",
        ncols=len(batches),
    )
    return figure
