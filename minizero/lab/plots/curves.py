"""Losses by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minizero.lab.plots.base import STYLE, line, single


@rc_context(STYLE)
def loss_curves(
    curves: Mapping[str, Sequence[float] | Mapping[int, float]], ylabel: str = "loss"
) -> Figure:
    """A line a run; runs that are equal, number for number, share one.

    curves: by name, the loss of steps 1, 2, ... or a loss by step.
    """
    runs: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, losses in curves.items():
        steps = losses if isinstance(losses, Mapping) else dict(enumerate(losses, 1))
        points = tuple((int(step), float(loss)) for step, loss in steps.items())
        if not points:
            raise ValueError(f"The run {name!r} has no losses; give at least one.")
        runs.setdefault(points, []).append(name)
    figure, axes = single(3.1)
    lines = {}
    for i, (points, names) in enumerate(runs.items()):
        x, y = zip(*points, strict=True)
        (lines[points],) = axes.plot(
            x,
            y,
            linewidth=1.8,
            marker="o" if len(x) == 1 else "",
            label=" = ".join(names),
            **line(i),
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(ylabel)
    # A loss falls, so this corner is free; the names stand in the lines' order.
    last = sorted(runs, key=lambda points: points[-1][1], reverse=True)
    handles = [lines[points] for points in last]
    axes.legend(handles=handles, loc="upper right", handlelength=2.6)
    return figure
