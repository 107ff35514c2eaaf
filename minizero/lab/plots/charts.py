"""Small charts: losses by step, runs against predictions, what decides what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minizero.lab.plots.style import GREY, LINES, STYLE, line, single


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
        look = line(i) | {"marker": "o" if len(x) == 1 else "", "linewidth": 1.8}
        (lines[points],) = axes.plot(x, y, label=" = ".join(names), **look)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(ylabel)
    # A loss falls, so this corner is free; the names stand in the lines' order.
    last = sorted(runs, key=lambda points: points[-1][1], reverse=True)
    handles = [lines[points] for points in last]
    axes.legend(handles=handles, loc="upper right", handlelength=2.6)
    return figure


Values = dict[str, list[float]]


def measured(comparisons: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Values]]:
    """Values by what was measured, by job, by library, each turn's.

    comparisons: those of a benchmark's JSON, named "what: job".
    """
    found: dict[str, dict[str, Values]] = {}
    for one in comparisons:
        what, _, job = one["name"].partition(": ")
        values = found.setdefault(what, {}).setdefault(job, {})
        values |= {one["a"]: one["a_values"], one["b"]: one["b_values"]}
    return found


def peer_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MARKERS = "osD^x"


@rc_context(STYLE)
def against(rates: Mapping[str, Sequence[tuple[float, float]]]) -> Figure:
    """Tokens a second and GPU; across published, up predicted.

    rates: (published, predicted) by where the rows come from. A grey band is 12 % wide
    to either side of what would be exact.
    """
    figure, axes = single(3.1)
    for (name, pairs), colour, marker in zip(
        rates.items(), (*LINES, GREY), MARKERS, strict=False
    ):
        x, y = zip(*pairs, strict=True)
        axes.loglog(x, y, marker, color=colour, markersize=3.5, alpha=0.8, label=name)
    ends = list(axes.get_xlim())
    axes.plot(ends, ends, color=GREY, linewidth=0.8)
    low, high = ([share * n for n in ends] for share in (0.88, 1.12))
    axes.fill_between(ends, low, high, color=GREY, alpha=0.2, lw=0, label="±12 %")
    axes.set_title("tokens a second and GPU", fontsize=9.5, loc="left")
    axes.set_xlabel("published")
    axes.set_ylabel("predicted")
    axes.legend(loc="upper left", fontsize=8.5)
    return figure


@rc_context(STYLE)
def arrows(rows: Sequence[tuple[str, str, str]]) -> Figure:
    """For each row code, below it an arrow to a name, and what is said of it."""
    more = [0.3 * keys.count("\n") for keys, *_ in rows]  # further lines of keys
    height = len(rows) + sum(more)
    figure, axes = single(0.3 + 0.75 * height)
    figure.set_figwidth(3.4)
    for i, (keys, made, what) in enumerate(rows):
        y = i + sum(more[: i + 1])
        axes.text(0.0, y - 0.1, keys, va="bottom", family="monospace", fontsize=8.5)
        axes.text(0.05, y + 0.1, f"\u2192 {made}", va="center", fontweight="bold")
        axes.text(0.11, y + 0.35, what, va="center", fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(height - 0.5, -0.6))
    axes.axis("off")
    return figure
