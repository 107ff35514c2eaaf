"""Figures of checkpoints: what is in them, how they are made, what loading takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.memory import memory_over_step
from minizero.lab.plots.spans import draw_bar
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    LINES,
    STYLE,
    amount,
    ink,
    legend,
    name_rows,
    single,
    waiting,
)
from minizero.memory.tracker import Sample

Span = tuple[str, float, float]
"""What a rank does in a save, and from when to when, in seconds."""

SPANS = {
    "prepare": CATEGORY_COLOURS["parameters"],
    "marker": CATEGORY_COLOURS["optimizer"],
    "decide": CATEGORY_COLOURS["gradients"],
    "point": LINES[2],
}
"""The parts of a save, by colour; a rank that does none of them waits."""


@rc_context(STYLE)
def shards_figure(slots: Mapping[str, int], saved: int, loaded: int) -> Figure:
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
def protocol_figure(ranks: Sequence[Sequence[Span]]) -> Figure:
    """A save on every rank against time: prepare, decide, point, and waits between.

    ranks: the spans of each; "wait" is drawn below the others. The lines at the end of
    "decide" and "point" name the call of `load` that finds the checkpoint from then on.
    """
    start = min(begin for spans in ranks for _, begin, _ in spans)
    figure, axes = single(1.3 + 0.42 * len(ranks))
    used, order = set(), ["wait", *SPANS]
    for r, spans in enumerate(ranks):
        for what, begin, end in sorted(spans, key=lambda span: order.index(span[0])):
            left, right = 1e3 * (begin - start), 1e3 * (end - start)
            draw_bar(axes, r - 0.25, left, right, 0.5, SPANS.get(what))
            used.add(what)
            if what in ("decide", "point"):
                axes.axvline(right, color=GREY, linestyle=":", linewidth=1.2)
                axes.annotate(
                    "load(tag)" if what == "decide" else "load()",
                    (right, 1),
                    xycoords=("data", "axes fraction"),
                    xytext=(-3 if what == "decide" else 3, 2),
                    textcoords="offset points",
                    ha="right" if what == "decide" else "left",
                )
    name_rows(axes, [f"rank {r}" for r in range(len(ranks))])
    axes.set(xlabel="milliseconds")
    patches = [Patch(facecolor=SPANS[w], label=w) for w in SPANS if w in used]
    legend(figure, [*patches, waiting()])
    return figure


@rc_context(STYLE)
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
        f"at most {amount(limit)}",
        (0.01, limit),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
    )
    return figure
