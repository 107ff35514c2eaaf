"""Steps as lanes: what a rank computes, and what is on its way meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.machine import Interval

from .plots import STYLE, WIDTH
from .style import GREY, OP_COLOURS

PHASE_COLOURS = {
    "forward": "#2AAB7F",
    "backward": "#A46694",
    "update": "#E6EE7F",
    "launch": GREY,
}
"""What a rank does; a measured step has its launches inside the phases."""


@rc_context(STYLE)
def lanes(steps: Mapping[str, Sequence[Interval]]) -> Figure:
    """Two lanes a step: computing (hatched: waiting), and the calls under way.

    steps: intervals by label, as `Timeline.intervals` and `Step.intervals()` give
        them. All share one axis, in milliseconds. A measured call is drawn until its
        wait ends, a simulated one until its transfer does.
    """
    if not any(steps.values()):
        raise ValueError("There is nothing to draw; give the intervals of a step.")
    figure = Figure(figsize=(WIDTH, 0.9 + 0.62 * len(steps)))
    axes = figure.add_subplot()
    for row, intervals in enumerate(steps.values()):
        for interval in intervals:
            computes = interval.lane == "compute"
            waits = interval.what == "wait"
            colour = (PHASE_COLOURS | OP_COLOURS).get(interval.what, GREY)
            axes.barh(
                row - 0.3 if computes else row + 0.08,
                (interval.end - interval.begin) * 1e3,
                0.36 if computes else 0.24,
                interval.begin * 1e3,
                align="edge",
                color="none" if waits else colour,
                edgecolor=GREY if waits else "none",
                hatch="//////" if waits else "",
                linewidth=0,
                alpha=None if computes else 0.8,
            )
    axes.set_yticks(range(len(steps)), list(steps))
    axes.set_ylim(len(steps) - 0.5, -0.5)
    axes.tick_params(left=False)
    axes.set_xlabel("milliseconds")
    used = {interval.what for step in steps.values() for interval in step}
    patches = [
        Patch(facecolor=colour, label=what)
        for what, colour in (PHASE_COLOURS | OP_COLOURS).items()
        if what in used
    ]
    patches.append(
        Patch(facecolor="none", edgecolor=GREY, hatch="//////", label="waiting")
    )
    figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=len(patches),
        handlelength=1.4,
        columnspacing=1.2,
        borderpad=0,
    )
    return figure
