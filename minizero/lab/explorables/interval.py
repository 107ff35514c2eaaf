"""How often to save: what saves and failures cost together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import traitlets
from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.lab.explorables.base import Amount, Explorable, look, module
from minizero.lab.plots.style import (
    GREY,
    LINES,
    STYLE,
    legend,
    line,
    note,
    short,
    single,
)

PALETTE = {"saves": look(LINES[1]), "steps made again": look(LINES[0])}


def best_interval(save: float, between: float) -> float:
    """Seconds of training between two saves that lose least (Young 1974).

    save: seconds that training stands still for a save. between: mean seconds between
    failures.
    """
    return math.sqrt(2 * save * between)


def lost(interval: float, save: float, between: float, restart: float = 0.0) -> float:
    """The share of time that is not training: saves, restarts and steps made again.

    For failures at random, in saves too (Daly 2006, the complete model): in the mean
    ``M exp(R / M) (exp((T + C) / M) - 1)`` seconds pass for T seconds of training.
    """
    with_saves = math.expm1(min(700.0, (interval + save) / between))
    return 1 - interval / (between * math.exp(restart / between) * with_saves)


@rc_context(STYLE)
def interval_figure(
    save: float, between: float, simulated: Mapping[float, float]
) -> Figure:
    """Time lost against the interval, by formula and as it was simulated.

    save, between: seconds of a save and mean seconds between failures.
    simulated: by interval in seconds, the share lost.
    """
    figure, axes = single(2.9)
    low, high = min(simulated) / 1.3, max(simulated) * 1.3
    xs = [low * (high / low) ** (i / 200) for i in range(201)]
    kinds = {
        "lost in all, formula": [lost(x, save, between) for x in xs],
        "of it in saves": [save / (x + save) for x in xs],
    }
    minutes = [x / 60 for x in xs]
    for i, (name, shares) in enumerate(kinds.items()):
        axes.plot(minutes, [100 * y for y in shares], label=name, **line(i))
    xs, ys = [x / 60 for x in simulated], [100 * y for y in simulated.values()]
    axes.plot(xs, ys, "o", color=GREY, label="lost in all, simulated")
    best = best_interval(save, between)
    axes.axvline(best / 60, color=GREY, linestyle=(0, (4, 2)), linewidth=1.2)
    text, top = f"√(2CM) = {best / 60:.0f} min", (best / 60, 1)
    note(axes, text, top, (4, -4), y="axes fraction", va="top")
    axes.set_xscale("log")
    ticks = [
        m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low < 60 * m < high
    ]
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.minorticks_off()
    axes.set(xlabel="minutes between two saves", ylabel="time lost, %")
    axes.set_ylim(0)
    legend(figure, axes.lines[:3])
    return figure


class SaveInterval(Explorable):
    """How often to save, and what saves and failures cost together.

    n_params: parameters of the model, 1e8 to 1e13, at 12 bytes each.
    bandwidth: gigabytes a second that all nodes write together, 0.1 to 10,000.
    nodes: 1 to 16,384.
    node_days: mean days between two failures of one node, 1 to 10,000.
    """

    kind = "interval"
    _esm = module(kind)

    n_params = Amount(7e9, 1e8, 1e13).tag(sync=True)
    bandwidth = Amount(10, 0.1, 10_000).tag(sync=True)
    nodes = traitlets.Int(128, min=1, max=16_384).tag(sync=True)
    node_days = Amount(250, 1, 10_000).tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    @property
    def save(self) -> float:
        """Seconds that a save takes."""
        return 12 * self.n_params / (self.bandwidth * 1e9)

    @property
    def between(self) -> float:
        """Mean seconds between two failures of any node."""
        return self.node_days * 86_400 / self.nodes

    def numbers(self) -> list[list[Any]]:
        """Shares of the time lost to saves and to steps made again, by interval."""
        best, rows = best_interval(self.save, self.between), []
        for factor in (0.25, 0.5, 1, 2, 4):
            share = lost(factor * best, self.save, self.between)
            saves = min(share, self.save / (factor * best + self.save))
            rows.append([f"every {duration(factor * best)}", saves, share - saves])
        return rows

    def describe(self) -> str:
        best = best_interval(self.save, self.between)
        share = lost(best, self.save, self.between)
        return (
            f"A save takes {duration(self.save)}, a failure comes every "
            f"{duration(self.between)}: save every {duration(best)}, and "
            f"{100 * share:.1f} % of the time is lost."
        )


def duration(seconds: float) -> str:
    """At most four digits and a unit: "18.98 min"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{short(seconds / size)} {unit}"
    return f"{short(seconds)} s"
