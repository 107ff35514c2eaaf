"""Figures and small measurements for the chapter on files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minizero.lab.plots.base import DASHES, STYLE, WIDTH, line, single
from minizero.lab.plots.lanes import stacked
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY, LINES
from minizero.memory.intensity import efficiency, intensity
from minizero.offload.async_io import aligned_buffer
from minizero.offload.nvme import Activity
from minizero.offload.swap_file import SwapFile
from minizero.overlap.machine import Interval

LANES = {
    "read": CATEGORY_COLOURS["gradients"],
    "step": CATEGORY_COLOURS["optimizer"],
    "write": CATEGORY_COLOURS["parameters"],
}


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
        transfer(at, buffer).wait()
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
        axes.plot(
            range(len(rates)),
            values,
            color=LINES[2 * i],
            linestyle=DASHES[i],
            marker="o",
            label=name,
        )
    axes.set_xticks(range(len(rates)), [str(depth) for depth in rates])
    axes.set(xlabel="requests in flight", ylabel="GB/s")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")
    return figure


def lanes_figure(timelines: Mapping[str, Sequence[Activity]]) -> Figure:
    """Three lanes for each run, in milliseconds; units in the bars."""
    runs = {
        name: [Interval(s.lane, s.lane, s.unit, s.started, s.finished) for s in spans]
        for name, spans in timelines.items()
    }
    return stacked(runs, LANES)


def _curves(
    axes: Axes, what: str, sequence: int, peak: float, batches: Sequence[int]
) -> None:
    """Efficiency against bandwidth, a curve a micro-batch."""
    bandwidths = [10 ** (8 + i / 20) for i in range(101)]
    for i, batch in enumerate(batches):
        ait = intensity(what, sequence, batch)
        axes.plot(
            [b / 1e9 for b in bandwidths],
            [100 * efficiency(ait, b, peak) for b in bandwidths],
            label=f"{batch}",
            **line(i),
        )
    axes.set_xscale("log")
    axes.set(ylim=(0, 100), xlim=(0.1, 1e4))
    axes.set_title(what, fontsize=9.5, color=GREY)
    axes.set_xlabel("GB/s")


@rc_context(STYLE)
def efficiency_figure(
    peak: float, sequence: int = 1024, batches: Sequence[int] = (1, 4, 16, 64)
) -> Figure:
    """Efficiency against the bandwidth a GPU has to where the state rests.

    peak: operations a second. batches: sequences a GPU, a curve each.
    """
    figure = Figure(figsize=(WIDTH, 2.9))
    for place, what in enumerate(("parameters", "optimizer"), 1):
        axes = figure.add_subplot(1, 2, place)
        _curves(axes, what, sequence, peak, batches)
        if place == 1:
            axes.set_ylabel("efficiency, %")
        else:
            axes.set_yticklabels([])
    figure.legend(
        *axes.get_legend_handles_labels(),
        title="sequences a GPU",
        loc="outside upper center",
        ncols=len(batches),
    )
    return figure


@rc_context(STYLE)
def point_figure(
    peak: float,
    bandwidth: float,
    predicted: Mapping[int, tuple[float, float]],
    measured: Mapping[int, float],
) -> Figure:
    """Measured efficiency by tokens a step, on the curve of the formula.

    predicted: by tokens a step (operations a byte, efficiency). bandwidth, peak: of
    the curve, bytes and operations a second. measured: efficiency by tokens.
    """
    figure, axes = single(2.9)
    aits = [ait for ait, _ in predicted.values()]
    low, high = min(aits) / 4, max(aits) * 4
    curve = [low * (high / low) ** (i / 100) for i in range(101)]
    axes.plot(
        curve,
        [100 * efficiency(ait, bandwidth, peak) for ait in curve],
        color=LINES[0],
        label="formula",
    )
    axes.plot(
        aits,
        [100 * value for value in measured.values()],
        "o",
        color=LINES[2],
        label="measured",
    )
    for tokens, (ait, share) in predicted.items():
        side = 1 if measured[tokens] >= share else -1  # away from the curve
        axes.annotate(
            f"{tokens:,} tokens",
            (ait, 100 * measured[tokens]),
            xytext=(-7 * side, 5 * side),
            textcoords="offset points",
            ha="right" if side > 0 else "left",
            va="bottom" if side > 0 else "top",
            fontsize=8.5,
            color=GREY,
        )
    axes.set_xscale("log")
    axes.set(ylim=(0, 105), xlabel="operations a byte", ylabel="efficiency, %")
    axes.legend(loc="lower right")
    return figure
