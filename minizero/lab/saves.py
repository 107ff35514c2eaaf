"""Figures of checkpoints, and what saves and failures cost, to play with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import traitlets
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.tracker import Sample

from .explorer import Explorable
from .plots import DASHES, STYLE, WIDTH, memory_over_step
from .style import CATEGORY_COLOURS, GREY, LINES, amount, ink

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
    figure = Figure(figsize=(WIDTH, 2.7))
    axes = figure.add_subplot()
    start = 0
    for i, (name, size) in enumerate(slots.items()):
        face = LINES[i % len(LINES)]
        _box(axes, start, size, 1, face, name, DASHES[0])
        start += size
    for y, ranks, word in ((0, saved, "file"), (2, loaded, "rank")):
        size = -(-numel // ranks)
        for r in range(ranks):
            _box(axes, r * size, size, y, "none", f"{word} {r}", "-")
        for edge in range(size, ranks * size, size):
            low, high = (0.4, 1.4) if y == 0 else (0.6, 1.6)
            axes.plot([edge, edge], [low, high], color=GREY, linestyle=":", lw=1.2)
        if ranks * size > numel:
            pad = (numel, y - 0.4), ranks * size - numel, 0.8
            axes.bar(
                pad[0][0],
                pad[2],
                pad[1],
                pad[0][1],
                align="edge",
                color="none",
                edgecolor=GREY,
                hatch="///",
                linewidth=0,
            )
    axes.set_yticks(
        range(3), [f"saved by {saved}", "parameters", f"loaded by {loaded}"]
    )
    axes.set(ylim=(2.6, -0.6), xlabel="element of the flat buffer")
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(left=False)
    return figure


def _box(
    axes: Axes, start: float, size: float, y: int, face: str, text: str, line: Any
) -> None:
    axes.barh(
        y, size, 0.8, start, color=face, edgecolor=GREY, linewidth=1, linestyle=line
    )
    colour = GREY if face == "none" else ink(face)
    axes.text(
        start + size / 2, y, text, ha="center", va="center", color=colour, fontsize=9
    )


@rc_context(STYLE)
def stops_figure(outcomes: Mapping[str, Sequence[str]]) -> Figure:
    """A strip a way of writing: what was found after a stop at each place.

    outcomes: by label, "old", "torn" or "new" for each stop, in order.
    """
    figure = Figure(figsize=(WIDTH, 0.9 + 0.55 * len(outcomes)))
    axes = figure.add_subplot()
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
    axes.set_yticks(range(len(outcomes)), list(outcomes))
    axes.set(
        xlabel="where the writer was stopped, % of its operations",
        xlim=(0, 100),
        ylim=(len(outcomes) - 0.5, -0.5),
    )
    axes.spines[["left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(
        handles=[
            Patch(facecolor=OUTCOMES[n], hatch=HATCHES[n], edgecolor="white", label=t)
            for n, t in (
                ("old", "the old one is whole"),
                ("torn", "torn"),
                ("new", "the new one is whole"),
            )
        ],
        loc="outside upper left",
        ncols=3,
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


def best_interval(save: float, between: float) -> float:
    """Seconds of training between two saves that lose least (Young 1974).

    save: seconds that training stands still for a save. between: mean seconds between
    failures.
    """
    return math.sqrt(2 * save * between)


def lost(interval: float, save: float, between: float, restart: float = 0.0) -> float:
    """The share of time that is not training: saves, restarts and steps made again.

    For failures at random, in saves too (Daly 2006, the complete model): in the mean
    ``M exp(R / M) (exp((T + C) / M) - 1)`` seconds pass for T seconds of training.
    """
    with_saves = math.expm1(min(700.0, (interval + save) / between))
    return 1 - interval / (between * math.exp(restart / between) * with_saves)


@rc_context(STYLE)
def interval_figure(
    save: float, between: float, simulated: Mapping[float, float]
) -> Figure:
    """Time lost against the interval, by formula and as it was simulated.

    save, between: seconds of a save and mean seconds between failures.
    simulated: by interval in seconds, the share lost.
    """
    figure = Figure(figsize=(WIDTH, 2.9))
    axes = figure.add_subplot()
    low, high = min(simulated) / 1.3, max(simulated) * 1.3
    xs = [low * (high / low) ** (i / 200) for i in range(201)]
    kinds = {
        "saves": [save / (x + save) for x in xs],
        "both": [lost(x, save, between) for x in xs],
    }
    axes.plot([x / 60 for x in xs], [100 * y for y in kinds["both"]], color=LINES[0])
    axes.plot(
        [x / 60 for x in xs],
        [100 * y for y in kinds["saves"]],
        color=LINES[1],
        linestyle=DASHES[1],
    )
    axes.plot(
        [x / 60 for x in simulated],
        [100 * y for y in simulated.values()],
        "o",
        color=LINES[2],
    )
    best = best_interval(save, between)
    axes.axvline(best / 60, color=GREY, linestyle=(0, (4, 2)), linewidth=1.2)
    axes.annotate(
        f"√(2CM) = {best / 60:.0f} min",
        (best / 60, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
    )
    axes.set_xscale("log")
    ticks = [
        m for m in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low < 60 * m < high
    ]
    axes.set_xticks(ticks, [str(m) for m in ticks])
    axes.minorticks_off()
    axes.set(xlabel="minutes between two saves", ylabel="time lost, %")
    axes.set_ylim(0)
    figure.legend(
        ["lost in all, formula", "of it in saves", "lost in all, simulated"],
        loc="outside upper left",
        ncols=3,
    )
    return figure


class SaveInterval(Explorable):
    """How often to save, and what saves and failures cost together.

    n_params: parameters of the model, 1e8 to 1e13, at 12 bytes each.
    bandwidth: gigabytes a second that all nodes write together, 0.1 to 10,000.
    nodes: 1 to 16,384.
    node_days: mean days between two failures of one node, 1 to 10,000.
    """

    _esm = Path(__file__).with_suffix(".js")

    n_params = traitlets.Float(7e9, min=1e8, max=1e13).tag(sync=True)
    bandwidth = traitlets.Float(10, min=0.1, max=10_000).tag(sync=True)
    nodes = traitlets.Int(128, min=1, max=16_384).tag(sync=True)
    node_days = traitlets.Float(250, min=1, max=10_000).tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    def __init__(self, **controls: Any) -> None:
        unknown = set(controls) - set(self.class_trait_names(sync=True))
        if unknown:
            raise TypeError(f"The explorable has no control {min(unknown)!r}.")
        palette = {"saves": LINES[1], "again": LINES[0], "grey": GREY}
        super().__init__(palette=palette, **controls)

    @property
    def save(self) -> float:
        """Seconds that a save takes."""
        return 12 * self.n_params / (self.bandwidth * 1e9)

    @property
    def between(self) -> float:
        """Mean seconds between two failures of any node."""
        return self.node_days * 86_400 / self.nodes

    def describe(self) -> str:
        """The best interval and what it loses, in words."""
        best = best_interval(self.save, self.between)
        share = lost(best, self.save, self.between)
        return (
            f"A save takes {duration(self.save)}, a failure comes every "
            f"{duration(self.between)}: save every {duration(best)}, and "
            f"{100 * share:.1f} % of the time is lost."
        )

    def fallback(self) -> str:
        return f"<p>{self.describe()}</p>"

    def __repr__(self) -> str:
        return self.describe()


def save_interval(**controls: Any) -> SaveInterval:
    """The explorable, with some controls set."""
    return SaveInterval(**controls)


def duration(seconds: float) -> str:
    """Three digits and a unit: "19.0 min"."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"
