"""Runs that were measured against what is predicted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.lab.plots.base import STYLE, WIDTH
from minizero.lab.plots.style import GREY, LINES

MARKERS = "osD^x"


@rc_context(STYLE)
def against(
    rates: Mapping[str, Sequence[tuple[float, float]]],
    memories: Sequence[tuple[float, float]],
) -> Figure:
    """Two panels: tokens a second and GPU, and GiB; across measured, up predicted.

    rates: (measured, predicted) by where the rows come from. A grey band is 12 % wide
    to either side of what would be exact.
    """
    figure = Figure(figsize=(WIDTH, 3.1))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for (name, pairs), colour, marker in zip(
        rates.items(), (*LINES, GREY), MARKERS, strict=False
    ):
        x, y = zip(*pairs, strict=True)
        left.loglog(x, y, marker, color=colour, markersize=3.5, alpha=0.8, label=name)
    right.plot(*zip(*memories, strict=True), "s", color=LINES[1], markersize=5)
    for axes, title in (
        (left, "tokens a second and GPU"), (right, "GiB of a GPU at the peak"),
    ):  # fmt: skip
        low, high = axes.get_xlim()
        ends = [low, high]
        axes.plot(ends, ends, color=GREY, linewidth=0.8)
        axes.fill_between(
            ends, [0.88 * n for n in ends], [1.12 * n for n in ends],
            color=GREY, alpha=0.2, linewidth=0,
        )  # fmt: skip
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.set_xlabel("measured")
    left.set_ylabel("predicted")
    left.legend(loc="upper left", fontsize=8.5)
    return figure
