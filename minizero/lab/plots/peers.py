"""What libraries cost beside one another: `make bench ARGS=peers`, drawn and tabled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.lab.plots.base import STYLE, end_label, name_rows, no_numbers, single
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY

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


@rc_context(STYLE)
def peer_bars(values: Mapping[str, Sequence[float]], order: Sequence[str]) -> Figure:
    """A bar a library as long as its median, and a line from its least to its most.

    values: milliseconds of each turn, by library. order: of the rows; what was not
    measured is left out.
    """
    rows = [name for name in order if name in values]
    figure, axes = single(0.34 * len(rows) + 0.3)
    for row, name in enumerate(rows):
        turns = values[name]
        kind = "parameters" if name.startswith("minizero") else "gradients"
        axes.barh(row, median(turns), color=CATEGORY_COLOURS[kind], height=0.62)
        axes.plot([min(turns), max(turns)], [row, row], color=GREY, linewidth=1.4)
        end_label(axes, max(turns), row, f"{median(turns):,.0f}")
    axes.axvline(0, color=GREY, linewidth=0.8)
    name_rows(axes, rows)
    no_numbers(axes)
    return figure


def peer_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
