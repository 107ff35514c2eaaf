"""Horizontal bars: bytes by category, bytes read and written, libraries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.models.activations import Lines
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    LINES,
    STYLE,
    amount,
    ink,
    legend,
    name_rows,
    note,
    single,
)
from minizero.memory.labels import CATEGORIES
from minizero.memory.plan import Bytes

Rows = Mapping[str, Mapping[str, float]]


@rc_context(STYLE)
def bars(
    rows: Rows,
    colours: Mapping[str, str],
    say: Callable[[float], str],
    limit: float | None = None,
    inside: Callable[[str, float], str] = lambda part, size: "",
) -> Figure:
    """A bar for each row, stacked from its parts, with the sum written at its end.

    rows: by label, the size of each part. colours: of the parts, in the legend's order;
    "none" leaves one clear. limit: drawn as a dashed line across the bars. inside: what
    is written into a part where it fits. Raises ValueError if there is nothing to draw.
    """
    if not rows:
        raise ValueError("There is nothing to draw; give at least one row.")
    totals = [sum(parts.values()) for parts in rows.values()]
    longest = max([*totals, limit or 0]) or 1.0
    figure, axes = single(1.0 + 0.42 * len(rows))
    for y, (parts, total) in enumerate(zip(rows.values(), totals, strict=True)):
        left = 0.0
        for part, size in parts.items():
            face, text = colours[part], inside(part, size)
            look: dict[str, Any] = {"color": face, "edgecolor": GREY, "linewidth": 0.8}
            axes.barh(y, size, 0.66, left, **look)
            # A digit is about 1/12 inch, and the bars have some 4.4 inches.
            if text and size / longest * 4.4 > len(text) / 12 + 0.1:
                box = {"facecolor": face, "linewidth": 0, "pad": 1}  # over the limit
                centre: Any = {"ha": "center", "va": "center", "size": 9, "bbox": box}
                axes.text(left + size / 2, y, text, color=ink(face), **centre)
            left += size
        hidden = limit is not None and 0 <= limit - total < 0.18 * longest
        end = limit if limit and hidden else total
        note(axes, say(total), (end, y), (5, 0), va="center", fontweight="bold")
    if limit is not None:
        axes.axvline(limit, color=GREY, linestyle=(0, (4, 2)), linewidth=1.4)
        above = {"y": "axes fraction", "ha": "center", "va": "bottom"}
        note(axes, say(limit), (limit, 1), (0, 2), **above)
    name_rows(axes, rows)
    # the bars carry their numbers themselves
    axes.tick_params(bottom=False, labelbottom=False)
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, longest * 1.14)
    used = [p for p in colours if any(parts.get(p) for parts in rows.values())]
    patches = [Patch(facecolor=colours[p], edgecolor=GREY, label=p) for p in used]
    legend(figure, patches)
    return figure


def memory_bars(
    breakdowns: Mapping[str, Bytes | Mapping[str, float]], budget: float | None = None
) -> Figure:
    """A bar for each label: bytes by category, and their sum.

    breakdowns: by label, a `Breakdown`, a part of one such as ``b.host``, or bytes
        by category such as ``tracker.live``.
    budget: bytes of a device, drawn as a line across the bars.
    """
    rows = {label: _by_category(b) for label, b in breakdowns.items()}
    return bars(rows, CATEGORY_COLOURS, amount, budget, lambda _, size: amount(size))


def _by_category(breakdown: Bytes | Mapping[str, float]) -> dict[str, float]:
    if not isinstance(breakdown, Mapping):
        return {name: float(getattr(breakdown, name, 0)) for name in CATEGORIES}
    if unknown := breakdown.keys() - set(CATEGORIES):
        known = ", ".join(CATEGORIES)
        raise ValueError(f"{min(unknown)!r} is no category of memory; give {known}.")
    return {name: float(breakdown.get(name, 0)) for name in CATEGORIES}


def saved_bars(blocks: Mapping[str, Lines]) -> Figure:
    """A bar for each label: the bytes that a block saves, cut by the module's name."""
    rows: dict[str, dict[str, float]] = {}
    for label, lines in blocks.items():
        row = rows.setdefault(label, {})
        for (module, _), nbytes in lines.items():
            name = module.rpartition(".")[2] or "input"
            row[name] = row.get(name, 0) + nbytes
    hue = CATEGORY_COLOURS["activations"]
    faces = {part: hue for row in rows.values() for part in row}
    figure = bars(rows, faces, amount, inside=lambda part, _: part)
    figure.legends.clear()
    for patch in figure.axes[0].patches:
        patch.set_edgecolor("#FFFFFF")  # grey would not part them
    return figure


def traffic_bars(
    moved: Mapping[str, tuple[float, float]], floor: float, unit: str
) -> Figure:
    """A bar for each way of doing the same: what it reads, and what it writes.

    moved: (read, written), by name. floor: the least of both together, a dashed line.
    """
    kinds = f"{unit}, read", f"{unit}, written"
    rows = {name: dict(zip(kinds, pair, strict=True)) for name, pair in moved.items()}
    return bars(rows, dict(zip(kinds, LINES, strict=False)), "{:.4g}".format, floor)


def peer_bars(values: Mapping[str, Sequence[float]], order: Iterable[str]) -> Figure:
    """A bar for each library, as long as its median, and a line from least to most.

    values: milliseconds of each turn, by library. order: of the rows; what was not
    measured is left out.
    """
    turns = {name: values[name] for name in order if name in values}
    ours = {name: name.startswith("minizero") for name in turns}
    kinds = {True: "this package", False: "others"}
    rows = {name: {kinds[ours[name]]: median(turns[name])} for name in turns}
    colours = dict(zip(kinds.values(), LINES, strict=False))
    figure = bars(rows, colours, "{:,.0f}".format)
    for y, seen in enumerate(turns.values()):
        figure.axes[0].plot([min(seen), max(seen)], [y + 0.41] * 2, color=GREY, lw=1.4)
    return figure
