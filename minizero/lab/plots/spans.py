"""Bars over time: what a rank computes, and the collectives that run meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.style import (
    DOING_COLOURS,
    GREY,
    STYLE,
    WIDTH,
    ink,
    legend,
    name_rows,
    single,
    waiting,
)
from minizero.overlap.simulator import Interval

if TYPE_CHECKING:
    from minizero.comm.ledger import Call


def draw_bar(
    axes: Axes, y: float, begin: float, end: float, height: float, colour: str | None
) -> None:
    """A bar whose upper edge is at `y`, in milliseconds; hatched without a colour."""
    axes.barh(
        y,
        end - begin,
        height,
        begin,
        align="edge",
        color=colour or "none",
        edgecolor="none" if colour else GREY,
        hatch="" if colour else "//////",
        linewidth=0,
    )


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each span the first lane that is free when it begins."""
    ends: list[float] = []
    lanes = []
    for begin, end in spans:
        lane = next((i for i, e in enumerate(ends) if e <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def timeline(calls_by_rank: Mapping[int, Sequence[Call]] | Sequence[Any]) -> Figure:
    """Two lanes for each rank: when it waits, and the collectives under way.

    calls_by_rank: the calls of each rank, by number or in order, as `launch` returns
        them. Their times are seconds of one clock.
    """
    ranks = dict(
        calls_by_rank.items()
        if isinstance(calls_by_rank, Mapping)
        else enumerate(calls_by_rank)
    )
    ranks = {r: [c for c in row if c.finished] for r, row in ranks.items()}
    start = min((c.launched for row in ranks.values() for c in row), default=0.0)
    return lanes(
        {
            f"rank {rank}": [
                Interval(lane, what, c.unit, begin - start, c.finished - start)
                for c in row
                for lane, what, begin in (
                    ("link", c.op, c.launched), ("compute", "wait", c.waited),
                )
            ]
            for rank, row in ranks.items()
        },
        "milliseconds since the first launch",
    )  # fmt: skip


@rc_context(STYLE)
def lanes(
    steps: Mapping[str, Sequence[Interval]], unit: str = "milliseconds"
) -> Figure:
    """Two lanes a step: what the rank does (hatched: waiting), and the calls under way.

    steps: intervals by label, as `Timeline.intervals` and `Step.intervals()` give
        them. All share one axis. A measured call is drawn until its wait ends, a
        simulated one until its transfer does; calls that are under way together share
        the height of their lane.
    """
    if not any(steps.values()):
        raise ValueError("There is nothing to draw; give the intervals of a step.")
    figure, axes = single(0.9 + 0.62 * len(steps))
    for row, intervals in enumerate(steps.values()):
        calls = [i for i in intervals if i.lane == "link"]
        calls.sort(key=lambda call: call.begin)
        tracks = _lanes([(call.begin, call.end) for call in calls])
        height = 0.36 / (max(tracks, default=0) + 1)
        places = [
            *((row - 0.3, 0.36, i) for i in intervals if i.lane == "compute"),
            *(
                (row + 0.08 + height * k, height, i)
                for k, i in zip(tracks, calls, strict=True)
            ),
        ]
        for y, high, i in places:
            if i.end > i.begin:
                face = None if i.what == "wait" else DOING_COLOURS.get(i.what, GREY)
                draw_bar(axes, y, i.begin * 1e3, i.end * 1e3, high, face)
    name_rows(axes, steps)
    axes.set_xlabel(unit)
    used = {i.what for step in steps.values() for i in step if i.end > i.begin}
    patches = [
        Patch(facecolor=c, label=w) for w, c in DOING_COLOURS.items() if w in used
    ]
    legend(figure, [*patches, waiting()])
    return figure


@rc_context(STYLE)
def stacked(
    runs: Mapping[str, Sequence[Interval]], colours: Mapping[str, str]
) -> Figure:
    """A panel a run, and in it a row a lane; a bar has the name of its unit if it fits.

    runs: intervals by label, in seconds. colours: by lane, from the top.
    """
    start = {name: min(i.begin for i in run) for name, run in runs.items()}
    took = {name: max(i.end for i in run) - start[name] for name, run in runs.items()}
    longest = 1e3 * max(took.values())
    figure = Figure(figsize=(WIDTH, 0.7 + 1.05 * len(runs)))
    panels = figure.subplots(len(runs), sharex=True, squeeze=False)[:, 0]
    for axes, (name, run) in zip(panels, runs.items(), strict=True):
        for piece in run:
            width, y = 1e3 * (piece.end - piece.begin), list(colours).index(piece.lane)
            left, face = 1e3 * (piece.begin - start[name]), colours[piece.lane]
            axes.barh(
                y, width, 0.8, left, color=face, edgecolor="#FFFFFF", linewidth=0.8
            )
            # a bar too narrow for its unit's name has the name's last part, or none
            room = 85 * width / longest
            names = (piece.unit, piece.unit.rpartition(".")[2])
            text = next((name for name in names if len(name) < room), "")
            look = {"ha": "center", "va": "center", "color": ink(face)}
            axes.text(left + width / 2, y, text, fontsize=8.5, **look)
        ms = 1e3 * took[name]
        title = f"{name}: {ms:{'.3g' if ms < 1000 else '.0f'}} ms"
        axes.set_title(title, loc="left", fontsize=9.5, color=GREY)
        name_rows(axes, colours)
        axes.set_xlim(0, longest)
    panels[-1].set_xlabel("milliseconds")
    return figure
