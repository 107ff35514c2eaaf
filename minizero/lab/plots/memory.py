"""Memory by category: as bars, and over a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    CATEGORY_HATCHES,
    GREY,
    STYLE,
    amount,
    end_label,
    ink,
    legend,
    name_rows,
    no_numbers,
    single,
)
from minizero.memory.labels import CATEGORIES
from minizero.memory.plan import Bytes
from minizero.memory.tracker import Sample

COLUMNS = 600
"""Most moments that `memory_over_step` draws, about one a pixel."""


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
    figure, axes = single(1.0 + 0.42 * len(rows))
    for y, row in enumerate(rows.values()):
        _stack(axes, y, row, longest)
    for y, total in enumerate(totals):
        end = total
        if budget is not None and 0 <= budget - total < 0.18 * longest:
            end = budget  # the line would run through the number
        end_label(axes, end, y, amount(total))
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
    name_rows(axes, rows)
    no_numbers(axes)
    axes.set_xlim(0, longest * 1.14)
    legend(figure, _category_patches(rows.values()))
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
        axes.fill(x, y, linewidth=0, zorder=1 - depth / 10, **_fill(name))
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
    legend(figure, [_patch(name) for name in names])
    return figure


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
