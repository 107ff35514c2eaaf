"""Figures in one palette: memory by category, collectives over time, losses.

Every function returns a Figure, so it is a cell's last line or is given to
`display`. In a notebook they are PNG of two pixels to one, which is sharp and small,
and which every viewer shows: JupyterLab hides the SVG of a notebook that is not yet
trusted, and LaTeX takes none. Their background is clear and their text mid-grey, so
that one file serves a light page, a dark page and paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.memory import Bytes
from minizero.tracker import CATEGORIES, Sample

from .style import (
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    GREY,
    LINES,
    OP_COLOURS,
    amount,
    ink,
)

if TYPE_CHECKING:
    from minizero.ledger import Call

WIDTH = 6.4
"""Inches: 614 pixels of a page, the text width of the book."""

COLUMNS = 600
"""Most moments that `memory_over_step` draws, about one a pixel."""

DASHES = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))

STYLE: Any = {
    "figure.dpi": 96,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "figure.constrained_layout.use": True,
    "font.size": 9.5,
    "axes.labelsize": 9.5,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    # Fixed ids, for a figure that is saved as SVG.
    "svg.hashsalt": "minizero",
}


def use() -> None:
    """Set the style, and in a notebook the format; call it in the first cell."""
    mpl.rcParams.update(STYLE)
    try:
        from IPython import get_ipython
        from IPython.core.pylabtools import select_figure_formats
    except ImportError:
        return
    shell = get_ipython()
    if shell is not None:
        # Without the version of matplotlib, the same figure gives the same bytes.
        select_figure_formats(shell, {"retina"}, metadata={"Software": None})


@rc_context(STYLE)
def memory_bars(
    breakdowns: Mapping[str, Bytes | Mapping[str, float]],
    budget: float | None = None,
) -> Figure:
    """One stacked bar a label: bytes by category, the total at its end.

    breakdowns: by label, a `Breakdown`, a part of one such as ``b.host``, or bytes
        by category such as ``tracker.live``.
    budget: bytes of a device, drawn as a line across the bars.
    """
    if not breakdowns:
        raise ValueError("There is nothing to draw; give at least one breakdown.")
    rows = {label: _by_category(b) for label, b in breakdowns.items()}
    totals = [sum(row.values()) for row in rows.values()]
    longest = max([*totals, budget or 0]) or 1.0
    figure, axes = _figure(1.0 + 0.42 * len(rows))
    for y, row in enumerate(rows.values()):
        _stack(axes, y, row, longest)
    for y, total in enumerate(totals):
        axes.annotate(
            amount(total),
            (total, y),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold",
        )
    if budget is not None:
        axes.axvline(budget, color=GREY, linestyle=(0, (4, 2)), linewidth=1.4)
        axes.annotate(
            amount(budget),
            (budget, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            va="bottom",
        )
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, longest * 1.14)
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)
    _legend(figure, _category_patches(rows.values()))
    return figure


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
    figure, axes = _figure(3.1)
    shown = _thin(samples)
    names = [c for c in CATEGORIES if any(s.live.get(c) for s in samples)]
    total = [0] * len(shown)
    for depth, name in enumerate(names):
        total = [
            t + samples[i].live.get(name, 0) for t, i in zip(total, shown, strict=True)
        ]
        # Each area reaches down to zero, and the next lower one covers it.
        x, y = _stairs(shown, total)
        axes.fill(x, y, linewidth=0, zorder=1 - depth / 10, **_fill(name))
    peak = max(range(len(shown)), key=total.__getitem__)
    left = shown[peak] < len(samples) / 2
    axes.annotate(
        f"peak {amount(total[peak])}",
        (shown[peak], total[peak]),
        xytext=(5 if left else -5, 2),
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
    _legend(figure, [_patch(name) for name in names])
    return figure


@rc_context(STYLE)
def timeline(calls_by_rank: Mapping[int, Sequence[Call]] | Sequence[Any]) -> Figure:
    """One row a rank: each collective from its launch to its finish.

    The hatched end of a bar is the time that the rank spent waiting for it; the
    clear part ran beside computation. Calls that overlap are drawn below each other.

    calls_by_rank: the calls of each rank, by number or in order, as `launch` returns
        them. Their times are seconds of one clock.
    """
    ranks = dict(
        calls_by_rank.items()
        if isinstance(calls_by_rank, Mapping)
        else enumerate(calls_by_rank)
    )
    ranks = {r: [c for c in row if c.finished] for r, row in ranks.items()}
    calls = [call for row in ranks.values() for call in row]
    if not calls:
        raise ValueError("There are no calls; run a step inside comm.ledger().")
    start = min(call.launched for call in calls)
    figure, axes = _figure(0.9 + 0.5 * len(ranks))
    for y, row in enumerate(ranks.values()):
        lanes = _lanes(row)
        height = 0.8 / (max(lanes) + 1) if lanes else 0.8
        for call, lane in zip(row, lanes, strict=True):
            _call(axes, call, y - 0.4 + lane * height, height * 0.92, start)
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.tick_params(left=False)
    axes.set_xlabel("milliseconds since the first launch")
    seen = [op for op in OP_COLOURS if any(call.op == op for call in calls)]
    patches = [Patch(facecolor=OP_COLOURS[op], label=op) for op in seen]
    waiting = Patch(facecolor="none", edgecolor=GREY, hatch="//////", label="waiting")
    _legend(figure, [*patches, waiting])
    return figure


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
    figure, axes = _figure(3.1)
    lines = {}
    for i, (points, names) in enumerate(runs.items()):
        x, y = zip(*points, strict=True)
        (lines[points],) = axes.plot(
            x,
            y,
            color=LINES[i % len(LINES)],
            linestyle=DASHES[i % len(DASHES)],
            linewidth=1.8,
            marker="o" if len(x) == 1 else "",
            label=" = ".join(names),
        )
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    # A loss falls, so this corner is free; the names stand in the lines' order.
    last = sorted(runs, key=lambda points: points[-1][1], reverse=True)
    handles = [lines[points] for points in last]
    axes.legend(handles=handles, loc="upper right", handlelength=2.6)
    return figure


def _figure(height: float) -> tuple[Figure, Axes]:
    # Not pyplot's: it would show the figure again at the end of the cell.
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def _by_category(breakdown: Bytes | Mapping[str, float]) -> dict[str, float]:
    if isinstance(breakdown, Mapping):
        unknown = [name for name in breakdown if name not in CATEGORIES]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is no category of memory; choose from "
                f"{', '.join(CATEGORIES)}."
            )
        return {name: float(breakdown.get(name, 0)) for name in CATEGORIES}
    return {name: float(getattr(breakdown, name, 0)) for name in CATEGORIES}


def _fill(category: str) -> dict[str, Any]:
    """Face, hatch, and an edge in a darker shade of the face."""
    face = CATEGORY_COLOURS[category]
    shade = "#" + "".join(
        f"{int(face[i : i + 2], 16) * 7 // 10:02X}" for i in (1, 3, 5)
    )
    hatch = CATEGORY_HATCHES[category]
    return {"facecolor": face, "edgecolor": shade, "hatch": hatch}


def _patch(category: str) -> Patch:
    return Patch(label=category, **_fill(category))


def _category_patches(rows: Iterable[Mapping[str, float]]) -> list[Patch]:
    used = list(rows)
    return [_patch(name) for name in CATEGORIES if any(row[name] for row in used)]


def _legend(figure: Figure, patches: list[Patch]) -> None:
    figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=len(patches),
        handlelength=1.4,
        handleheight=1.0,
        columnspacing=1.4,
        borderpad=0,
    )


def _stack(axes: Axes, y: int, row: Mapping[str, float], longest: float) -> None:
    """The segments of one bar, each with its bytes where they fit."""
    left = 0.0
    for name, nbytes in row.items():
        if not nbytes:
            continue
        axes.barh(y, nbytes, 0.66, left, **_fill(name))
        text = amount(nbytes)
        # A digit is about 1/12 inch, and the bars have some 4.4 inches.
        if nbytes / longest * 4.4 > len(text) / 12 + 0.1:
            face = CATEGORY_COLOURS[name]
            axes.text(
                left + nbytes / 2,
                y,
                text,
                ha="center",
                va="center",
                fontsize=9,
                color=ink(face),
                # Keeps the hatch away from the digits.
                bbox={"facecolor": face, "edgecolor": "none", "pad": 1.2},
            )
        left += nbytes


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


def _lanes(calls: Sequence[Call]) -> list[int]:
    """For each call the first lane that is free when it is launched."""
    ends: list[float] = []
    lanes = []
    for call in calls:
        free = (i for i, end in enumerate(ends) if end <= call.launched)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [call.finished]
        lanes.append(lane)
    return lanes


def _call(axes: Axes, call: Call, y: float, height: float, start: float) -> None:
    begin, waited, end = (
        (t - start) * 1e3 for t in (call.launched, call.waited, call.finished)
    )
    face = OP_COLOURS.get(call.op, GREY)
    place: Any = {"y": y, "height": height, "align": "edge", "linewidth": 0}
    axes.barh(width=end - begin, left=begin, color=face, **place)
    if end > waited:
        edge = ink(face)
        place |= {"color": "none", "edgecolor": edge, "hatch": "//////"}
        axes.barh(width=end - waited, left=waited, **place)
