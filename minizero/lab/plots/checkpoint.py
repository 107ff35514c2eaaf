"""The figure of checkpoints: how saved and loaded shards cut a buffer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minizero.lab.plots.style import GREY, LINES, STYLE, ink, name_rows, single


@rc_context(STYLE)
def shards_figure(
    slots: Mapping[str, int], saved: int, loaded: int | None = None
) -> Figure:
    """A flat buffer as it is cut for the ranks that save, and for those that load.

    slots: elements of each parameter. saved, loaded: how many ranks.
    """
    numel = sum(slots.values())
    figure, axes = single(2.7 if loaded else 1.9)
    cuts = [(0, saved, "file"), (2, loaded, "rank")]
    start = 0
    for i, (name, size) in enumerate(slots.items()):
        face = LINES[i % len(LINES)]
        _box(axes, start, size, 1, face, name.replace(".", ".\n"))
        start += size
    for y, ranks, word in ((y, n, word) for y, n, word in cuts if n):
        size = -(-numel // ranks)
        for r in range(ranks):
            _box(axes, r * size, size, y, "none", f"{word} {r}")
        for edge in range(size, ranks * size, size):
            low, high = (0.4, 1.4) if y == 0 else (0.6, 1.6)
            axes.plot([edge, edge], [low, high], color=GREY, linestyle=":", lw=1.2)
        padding: Any = {"color": "none", "edgecolor": GREY, "hatch": "///", "lw": 0}
        axes.barh(y, ranks * size - numel, 0.8, numel, **padding)
    rows = [f"saved by {saved}", "parameters", f"loaded by {loaded}"]
    name_rows(axes, rows if loaded else rows[:2])
    axes.set(xlabel="element of the flat buffer")
    axes.spines[["left"]].set_visible(False)
    return figure


def _box(axes: Axes, start: float, size: float, y: int, face: str, text: str) -> None:
    axes.barh(y, size, 0.8, start, color=face, edgecolor=GREY, linewidth=1)
    colour = GREY if face == "none" else ink(face)
    axes.text(
        start + size / 2, y, text, ha="center", va="center", color=colour, fontsize=9
    )
