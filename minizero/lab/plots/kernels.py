"""What kernels move, against the least that they could."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.lab.plots.base import STYLE, end_label, name_rows, no_numbers, single
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY


@rc_context(STYLE)
def traffic_bars(
    moved: Mapping[str, tuple[float, float]], floor: float, unit: str
) -> Figure:
    """A bar a way of doing the same: what it reads, then what it writes.

    moved: (read, written), by name. floor: the least of both together, a dashed line.
    """
    figure, axes = single(0.42 * len(moved) + 0.55)
    for row, (read, written) in enumerate(moved.values()):
        axes.barh(row, read, color=CATEGORY_COLOURS["parameters"], height=0.62)
        axes.barh(
            row, written, left=read, color=CATEGORY_COLOURS["gradients"], height=0.62,
            hatch="//", edgecolor=GREY, linewidth=0,
        )  # fmt: skip
        end_label(axes, read + written, row, f"{read + written:.4g}")
    axes.axvline(floor, color=GREY, linestyle=(0, (5, 2)), linewidth=1.2)
    name_rows(axes, moved)
    no_numbers(axes)
    axes.set_title(
        f"{unit}: read (solid), written (striped); dashed: the least",
        loc="left",
        fontsize=9.5,
    )
    return figure
