"""One palette and one style for figures and explorables.

Five hues stand for the five states that memory holds, and for nothing else. What moves
or changes a state has its hue; all else is grey, or a pattern. Python draws with these
values, and hands them to the JavaScript of each explorable.

The hues start from Okabe and Ito's set (2008), moved until they also differ in
greyscale: at least 11 apart in lightness (CIE L*), and 20 apart in colour (CIE 1976) to
normal, protan, deutan and tritan eyes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minizero.memory.labels import amount as amount
from minizero.memory.labels import short as short

CATEGORY_COLOURS = {
    "parameters": "#0460A9",
    "gradients": "#ECAB25",
    "optimizer": "#2AAB7F",
    "activations": "#A46694",
    "buffers": "#E6EE7F",
}
"""A hue for each of `minizero.memory.CATEGORIES`."""

GREY = "#797979"
"""Text and axes: it stands out from white and from the dark theme's page alike."""

LINES = ("#666666", "#949494", "#7D7D7D", "#8A8A8A")
"""Greys of runs, ranks and libraries; dashes and marks tell them apart too."""

DOING_COLOURS = {
    "forward": "#BDBDBD",
    "backward": "#929292",
    "update": "#5A5A5A",
    "all_gather": CATEGORY_COLOURS["parameters"],
    "reduce_scatter": CATEGORY_COLOURS["gradients"],
    "all_reduce": CATEGORY_COLOURS["gradients"],
    "broadcast": GREY,
    "barrier": GREY,
}
"""What a rank does: grey for computing, and for a call the hue of what it carries."""

LINED: Any = {
    "launch": {"facecolor": "none", "edgecolor": GREY, "hatch": "..."},
    "wait": {"facecolor": "none", "edgecolor": GREY, "hatch": "//////"},
}
"""How the time looks in which a rank launches a call, or waits for one."""


def luminance(colour: str) -> float:
    """Relative luminance of "#RRGGBB", 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill`."""
    return max("#000000", "#FFFFFF", key=lambda colour: contrast(colour, fill))


WIDTH = 6.4
"""Inches: 614 pixels of a page, the text width of the book."""

DASHES: Any = ("-", (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))

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


def single(height: float) -> tuple[Figure, Axes]:
    """A figure of one panel, as wide as the page; `height` in inches."""
    # Not pyplot's: it would show the figure again at the end of the cell.
    figure = Figure(figsize=(WIDTH, height))
    return figure, figure.add_subplot()


def line(i: int) -> dict[str, Any]:
    """Colour and dashes of the i-th line of a figure."""
    return {"color": LINES[i % len(LINES)], "linestyle": DASHES[i % len(DASHES)]}


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """Rows at 0, 1, ... from the top, each with its name."""
    names = list(names)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.tick_params(left=False)


def note(
    axes: Axes,
    text: str,
    at: tuple[float, float],
    shift: tuple[float, float],
    x: str = "data",
    y: str = "data",
    **look: Any,
) -> None:
    """A text beside a place of a panel.

    shift: how far beside it, in points to the right and up. x, y: "axes fraction" where
    a coordinate of the place is a share of the panel, 0 to 1, and no value of its axis.
    """
    how: dict[str, Any] = {"xycoords": (x, y), "textcoords": "offset points"}
    axes.annotate(text, at, shift, **how, **look)


def legend(
    figure: Figure, handles: Sequence[Artist], columns: int = 0, length: float = 1.4
) -> None:
    """The names of colours in one line above the panel; `length`: of a handle."""
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=columns or len(handles),
        handlelength=length,
        handleheight=1.0,
        columnspacing=1.4,
        borderpad=0,
    )
