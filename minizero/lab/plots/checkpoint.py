"""Figures of checkpoints: what is in them, and what a stopped writer leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.base import STYLE, legend, name_rows, single
from minizero.lab.plots.memory import memory_over_step
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY, LINES, amount, ink
from minizero.memory.tracker import Sample

OUTCOMES = {
    "old": CATEGORY_COLOURS["parameters"],
    "torn": CATEGORY_COLOURS["gradients"],
    "new": CATEGORY_COLOURS["optimizer"],
}
"""What a stopped writer leaves, by colour."""

HATCHES = {"old": "", "torn": "//", "new": ""}


@rc_context(STYLE)
def rows_figure(slots: Mapping[str, int], saved: int, loaded: int) -> Figure:
    """A flat buffer as it is cut for the ranks that save, and for those that load.

    slots: elements of each parameter. saved, loaded: how many ranks.
    """
    numel = sum(slots.values())
    figure, axes = single(2.7)
    start = 0
    for i, (name, size) in enumerate(slots.items()):
        face = LINES[i % len(LINES)]
        _box(axes, start, size, 1, face, name)
        start += size
    for y, ranks, word in ((0, saved, "file"), (2, loaded, "rank")):
        size = -(-numel // ranks)
        for r in range(ranks):
            _box(axes, r * size, size, y, "none", f"{word} {r}")
        for edge in range(size, ranks * size, size):
            low, high = (0.4, 1.4) if y == 0 else (0.6, 1.6)
            axes.plot([edge, edge], [low, high], color=GREY, linestyle=":", lw=1.2)
        if ranks * size > numel:
            left, width = numel, ranks * size - numel
            axes.barh(
                y, width, 0.8, left, color="none", edgecolor=GREY, hatch="///", lw=0
            )
    name_rows(axes, [f"saved by {saved}", "parameters", f"loaded by {loaded}"])
    axes.set(xlabel="element of the flat buffer")
    axes.spines[["left"]].set_visible(False)
    return figure


def _box(axes: Axes, start: float, size: float, y: int, face: str, text: str) -> None:
    axes.barh(y, size, 0.8, start, color=face, edgecolor=GREY, linewidth=1)
    colour = GREY if face == "none" else ink(face)
    axes.text(
        start + size / 2, y, text, ha="center", va="center", color=colour, fontsize=9
    )


@rc_context(STYLE)
def stops_figure(outcomes: Mapping[str, Sequence[str]]) -> Figure:
    """A strip a way of writing: what was found after a stop at each place.

    outcomes: by label, "old", "torn" or "new" for each stop, in order.
    """
    figure, axes = single(0.9 + 0.55 * len(outcomes))
    for y, found in enumerate(outcomes.values()):
        begin = 0
        for i in range(1, len(found) + 1):
            if i == len(found) or found[i] != found[begin]:
                axes.barh(
                    y,
                    100 * (i - begin) / len(found),
                    0.6,
                    100 * begin / len(found),
                    color=OUTCOMES[found[begin]],
                    hatch=HATCHES[found[begin]],
                    edgecolor="white",
                    linewidth=0,
                )
                begin = i
    name_rows(axes, outcomes)
    axes.set(xlabel="where the writer was stopped, % of its operations", xlim=(0, 100))
    axes.spines[["left"]].set_visible(False)
    legend(
        figure,
        [
            Patch(facecolor=OUTCOMES[n], hatch=HATCHES[n], edgecolor="white", label=t)
            for n, t in (
                ("old", "the old one is whole"),
                ("torn", "torn"),
                ("new", "the new one is whole"),
            )
        ],
    )
    return figure


def loading_figure(samples: Sequence[Sample], shard: float, limit: float) -> Figure:
    """Live bytes of a rank while it loads, device and host together.

    shard: what it has in the end. limit: the most that it should have on the way.
    """
    merged = [
        replace(
            s,
            live={k: v + s.host.get(k, 0) for k, v in s.live.items()},
            host={},
        )
        for s in samples
    ]
    figure = memory_over_step(merged, limit)
    axes = figure.axes[0]
    axes.axhline(shard, color=GREY, linestyle=":", linewidth=1.2)
    for text in axes.texts:
        text.set_visible(not text.get_text().startswith("budget"))
    axes.annotate(
        f"shard and a row, {amount(limit)}",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
    )
    return figure
