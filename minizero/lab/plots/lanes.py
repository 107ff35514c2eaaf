"""Steps as lanes: what a rank computes, and what is on its way meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.base import STYLE, WIDTH, legend, name_rows, single, waiting
from minizero.lab.plots.style import GREY, OP_COLOURS, ink
from minizero.overlap.machine import Interval

PHASE_COLOURS = {
    "forward": "#2AAB7F",
    "backward": "#A46694",
    "update": "#E6EE7F",
    "launch": GREY,
}
"""What a rank does beside waiting."""


@rc_context(STYLE)
def lanes(steps: Mapping[str, Sequence[Interval]]) -> Figure:
    """Two lanes a step: what the rank does (hatched: waiting), and the calls under way.

    steps: intervals by label, as `Timeline.intervals` and `Step.intervals()` give
        them. All share one axis, in milliseconds. A measured call is drawn until its
        wait ends, a simulated one until its transfer does; calls that are under way
        together share the height of their lane.
    """
    if not any(steps.values()):
        raise ValueError("There is nothing to draw; give the intervals of a step.")
    figure, axes = single(0.9 + 0.62 * len(steps))
    for row, intervals in enumerate(steps.values()):
        tracks = _tracks([i for i in intervals if i.lane == "link"])
        height = 0.36 / max(1, len(tracks))
        for y, interval in [
            *((row - 0.3, i) for i in intervals if i.lane == "compute"),
            *((row + 0.08 + height * k, i) for k, t in enumerate(tracks) for i in t),
        ]:
            waits = interval.what == "wait"
            axes.barh(
                y,
                (interval.end - interval.begin) * 1e3,
                0.36 if interval.lane == "compute" else height,
                interval.begin * 1e3,
                align="edge",
                color="none"
                if waits
                else (PHASE_COLOURS | OP_COLOURS).get(interval.what, GREY),
                edgecolor=GREY if waits else "none",
                hatch="//////" if waits else "",
                linewidth=0,
            )
    name_rows(axes, steps)
    axes.set_xlabel("milliseconds")
    used = {i.what for step in steps.values() for i in step if i.end > i.begin}
    patches = [
        Patch(facecolor=colour, label=what)
        for what, colour in (PHASE_COLOURS | OP_COLOURS).items()
        if what in used
    ]
    legend(figure, [*patches, waiting()])
    return figure


def _tracks(calls: Sequence[Interval]) -> list[list[Interval]]:
    """The calls on as few tracks as keep those apart that are under way together."""
    tracks: list[list[Interval]] = []
    for call in sorted(calls, key=lambda call: call.begin):
        free = [track for track in tracks if track[-1].end <= call.begin]
        if free:
            free[0].append(call)
        else:
            tracks.append([call])
    return tracks


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
            look = {"color": face, "edgecolor": "#FFFFFF", "linewidth": 0.8}
            axes.barh(y, width, 0.8, left, **look)
            # A bar too narrow for its unit's name has the name's last part, or none.
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
