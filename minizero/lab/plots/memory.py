"""Memory by category over a step."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    STYLE,
    amount,
    legend,
    single,
)
from minizero.memory.labels import CATEGORIES
from minizero.memory.tracker import Sample

COLUMNS = 600
"""Most moments that `memory_over_step` draws, about one a pixel."""


@rc_context(STYLE)
def memory_over_step(samples: Sequence[Sample], budget: float | None = None) -> Figure:
    """Live bytes by category, stacked, from one allocation or free to the next.

    The samples stand at equal distances, not at their times: each change of memory
    has the same width, and the figure is the same on a fast and on a slow machine.
    Of more than :data:`COLUMNS` samples the highest of each group is drawn, so a
    peak is never lost. Marked samples get a line with their event and unit.
    """
    if not samples:
        raise ValueError("There are no samples; run the step inside a Tracker.")
    figure, axes = single(3.1)
    shown = _thin(samples)
    names = [c for c in CATEGORIES if any(s.live.get(c) for s in samples)]
    total = [0] * len(shown)
    for depth, name in enumerate(names):
        total = [
            t + samples[i].live.get(name, 0) for t, i in zip(total, shown, strict=True)
        ]
        # Each area reaches down to zero, and the next lower one covers it.
        x, y = _stairs(shown, total)
        face = CATEGORY_COLOURS[name]
        axes.fill(x, y, linewidth=0, zorder=1 - depth / 10, facecolor=face)
    peak = max(range(len(shown)), key=total.__getitem__)
    left = shown[peak] < len(samples) / 2
    axes.annotate(
        f"peak {amount(total[peak])}",
        (shown[peak], total[peak]),
        xytext=(5 if left else -5, 4),
        textcoords="offset points",
        ha="left" if left else "right",
        fontweight="bold",
    )
    highest = max(total[peak], budget or 0) or 1.0
    if budget is not None:
        axes.axhline(budget, color=GREY, linestyle=(0, (4, 2)), linewidth=1.4)
        axes.annotate(
            f"budget {amount(budget)}",
            (1, budget),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="right",
        )
    _marks(axes, samples)
    axes.set_xlim(0, max(len(samples) - 1, 1))
    axes.set_ylim(0, highest * 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))
    axes.set_xlabel("allocations and frees, in order")
    axes.tick_params(bottom=False, labelbottom=False)
    legend(
        figure, [Patch(facecolor=CATEGORY_COLOURS[name], label=name) for name in names]
    )
    return figure


def _thin(samples: Sequence[Sample]) -> list[int]:
    """At most COLUMNS indices and the last one: of each group that with most bytes."""
    size = -(-len(samples) // COLUMNS)
    groups = (
        range(i, min(i + size, len(samples))) for i in range(0, len(samples), size)
    )
    kept = [max(group, key=lambda i: sum(samples[i].live.values())) for group in groups]
    return kept if kept[-1] == len(samples) - 1 else [*kept, len(samples) - 1]


def _stairs(x: Sequence[int], y: Sequence[float]) -> tuple[list[int], list[float]]:
    """Outline of the area under steps; equal neighbours are one step."""
    xs, ys = [x[0]], [0.0]
    for place, value in zip(x, y, strict=True):
        if value != ys[-1]:
            xs += [place, place]
            ys += [ys[-1], value]
    return [*xs, x[-1], x[-1]], [*ys, ys[-1], 0.0]


def _marks(axes: Axes, samples: Sequence[Sample]) -> None:
    """A line at each marked sample and its name above, upright if there is no room."""
    named = [
        (i, f"{s.event} {s.unit}".strip()) for i, s in enumerate(samples) if s.event
    ]
    if not named:
        return
    inch = len(samples) / 5.6
    ends = [x for x, _ in named[1:]] + [len(samples)]
    crowded = any(
        x + len(text) / 13 * inch > end
        for (x, text), end in zip(named, ends, strict=True)
    )
    for x, text in named:
        axes.axvline(x, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.annotate(
            text,
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            rotation=90 if crowded else 0,
            ha="center" if crowded else "left",
            fontsize=8.5,
        )
