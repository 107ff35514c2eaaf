"""A second, narrow drawing of a figure, for the page of a phone.

It is the same figure, laid out again: letters keep their size, panels stand one below
the other, names of rows are broken, and what is written in a bar goes where it has no
room. It is stored beside the figure, in the metadata of the cell's output.
"""

from __future__ import annotations

import base64
import io
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from IPython import get_ipython
from IPython.core.pylabtools import retina_figure
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.legend import Legend
from matplotlib.text import Annotation

from minizero.lab.plots.style import STYLE, legend

INCHES, DPI = 3.4, 192
MOST_LETTERS = 14
"""Of a line of a row's name."""


def png(figure: Figure) -> tuple[str, dict[str, Any]]:
    """A figure as a notebook stores it, and its metadata with the narrow drawing."""
    wide, about = retina_figure(figure, base64=True, metadata={"Software": None})
    if figure.get_figwidth() > INCHES + 0.3:
        about["narrow"] = drawn(figure)
    return wide, about


def drawn(figure: Figure) -> dict[str, Any]:
    """The narrow drawing: a PNG of two pixels to one of a page, and its size there."""
    with mpl.rc_context(STYLE), narrow(figure):
        file = io.BytesIO()
        figure.savefig(file, dpi=DPI, metadata={"Software": None})
        width, height = (round(96 * inches) for inches in figure.get_size_inches())
    image = base64.b64encode(file.getvalue()).decode()
    return {"png": image, "width": width, "height": height}


def use() -> None:
    """Set the style, and in a notebook the format; call it in the first cell."""
    mpl.rcParams.update(STYLE)
    shell = get_ipython()
    if shell is not None:
        shell.display_formatter.formatters["image/png"].for_type(Figure, png)


@contextmanager
def narrow(figure: Figure) -> Iterator[None]:
    """Lay a figure out for a narrow page, and afterwards as it was."""
    with ExitStack() as stack:
        _, height = size = figure.get_size_inches()
        stack.callback(figure.set_size_inches, *size)
        height *= _stack(figure, stack)
        legends, figure.legends = figure.legends, []
        stack.callback(setattr, figure, "legends", legends)
        inside = [one for one in map(Axes.get_legend, figure.axes) if one]
        lines = sum([_fit(figure, old) for old in legends + inside]) - len(legends)
        figure.set_size_inches(INCHES, height + 0.2 * lines)
        for old in inside:
            _change(stack, old, visible=False)
        for axes in figure.axes:
            _break_names(axes, stack)
        figure.draw_without_rendering()
        for axes in figure.axes:
            _place(axes, stack)
            set_upright(axes, stack)
            _thin(axes, stack)
        yield


def _change(stack: ExitStack, artist: Any, **new: Any) -> None:
    """Set properties, and afterwards as they were."""
    stack.callback(artist.set, **{key: getattr(artist, f"get_{key}")() for key in new})
    artist.set(**new)


def _stack(figure: Figure, stack: ExitStack) -> float:
    """Put panels that stand side by side below each other; how much higher that is."""
    specs: list[Any] = [axes.get_subplotspec() for axes in figure.axes]
    if len(specs) < 2 or any(s is None or s.rowspan.start for s in specs):
        return 1.05
    grid = GridSpec(len(specs), 1, figure)
    for i, (axes, spec) in enumerate(zip(figure.axes, specs, strict=True)):
        stack.callback(axes.set_subplotspec, spec)
        axes.set_subplotspec(grid[i])
        if i:  # its neighbor had the names of their rows
            stack.callback(axes.tick_params, labelleft=False)
            axes.tick_params(labelleft=True)
    return 0.82 * len(specs)


def _break_names(axes: Axes, stack: ExitStack) -> None:
    """Break long names of rows."""
    names = [text.get_text() for text in axes.get_yticklabels()]
    if MOST_LETTERS < max(map(len, names), default=0) and "$" not in "".join(names):
        ticks = axes.get_yticks()
        stack.callback(axes.set_yticks, ticks, names)
        axes.set_yticks(ticks, [textwrap.fill(name, MOST_LETTERS) for name in names])


def _fit(figure: Figure, old: Legend) -> int:
    """Put another legend in the place of one, in as many columns as fit; its lines."""
    handles: Any = old.legend_handles
    for handle, text in zip(handles, old.texts, strict=True):
        handle.set_label(text.get_text())
    for columns in range(len(handles), 0, -1):
        legend(figure, handles, columns, old.handlelength)
        new = figure.legends[-1]
        if columns == 1 or new.get_window_extent().width < INCHES * figure.dpi - 12:
            break
        figure.legends.pop()
    new.set_title(old.get_title().get_text())
    return -(-len(handles) // columns)


def _place(axes: Axes, stack: ExitStack) -> None:
    """Hide what is wider than its bar; a limit's line strikes through no total."""
    bars = [patch.get_window_extent() for patch in axes.patches]
    lines: Any = axes.lines
    limits = [line for line in lines if len(set(line.get_xdata())) == 1]
    for text in axes.texts:
        own = text.get_window_extent()
        x, y = (own.x0 + own.x1) / 2, (own.y0 + own.y1) / 2
        around = [bar.width for bar in bars if bar.contains(x, y)]
        centred = text.get_horizontalalignment() == "center"
        if centred and around and own.width > min(around):
            _change(stack, text, visible=False)
        if isinstance(text, Annotation) and text.get_verticalalignment() == "center":
            for line in limits:
                if own.x0 < line.get_window_extent().x0 < own.x1 + 3:
                    stack.callback(setattr, text, "xy", text.xy)
                    text.xy = (line.get_xdata()[0], text.xy[1])


def set_upright(axes: Axes, stack: ExitStack) -> None:
    """Set the names above a panel upright if two of them would touch, and apart."""
    where, end = ("data", "axes fraction"), 0.0
    names: Any = [text for text in axes.texts if getattr(text, "xycoords", "") == where]
    boxes = [name.get_window_extent() for name in names]
    if any(a.x1 > b.x0 for a, b in pairwise(boxes)):
        for name in names:
            x, _ = axes.transData.transform((name.xy[0], 0))
            end = max(x, end + 12)
            shift = 0.75 * (end - x), 3
            _change(stack, name, rotation=90, ha="center", position=shift)


def _thin(axes: Axes, stack: ExitStack) -> None:
    """Leave out every second number of an axis, until none touches the next."""
    shown = [text for text in axes.get_xticklabels() if text.get_text()]
    while any(
        a.get_window_extent().x1 + 2 > b.get_window_extent().x0
        for a, b in pairwise(shown)
    ):
        for text in shown[1::2]:
            _change(stack, text, visible=False)
        shown = shown[::2]
