"""Bars over time: what a rank computes, and the collectives that run meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.style import (
    DOING_COLOURS,
    GREY,
    LINED,
    STYLE,
    legend,
    name_rows,
    single,
)
from minizero.overlap.simulator import Interval

if TYPE_CHECKING:
    from minizero.comm.ledger import Call


def _lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """For each span the first lane that is free when it begins."""
    ends: list[float] = []
    lanes = []
    for begin, end in spans:
        lane = next((i for i, e in enumerate(ends) if e <= begin), len(ends))
        ends[lane : lane + 1] = [end]
        lanes.append(lane)
    return lanes


def timeline(calls_by_rank: Sequence[Sequence[Call]]) -> Figure:
    """Two lanes for each rank: when it waits, and the collectives under way.

    calls_by_rank: the calls of each rank, as `launch` returns them. Their times are
        seconds of one clock.
    """
    ranks = [[c for c in calls if c.finished] for calls in calls_by_rank]
    start = min((c.launched for calls in ranks for c in calls), default=0.0)
    return lanes(
        {
            f"rank {rank}": [
                Interval(lane, what, c.unit, begin - start, c.finished - start)
                for c in calls
                for lane, what, begin in (
                    ("link", c.op, c.launched), ("compute", "wait", c.waited),
                )
            ]
            for rank, calls in enumerate(ranks)
        },
        "milliseconds since the first launch",
    )  # fmt: skip


@rc_context(STYLE)
def lanes(
    steps: Mapping[str, Sequence[Interval]], unit: str = "milliseconds"
) -> Figure:
    """Two lanes a step: what the rank does (lined: no computing), and calls under way.

    steps: intervals by label, as `Timeline.intervals` and `Step.intervals()` give
        them. All share one axis. A measured call is drawn until its wait ends, a
        simulated one until its transfer does; calls that are under way together share
        the height of their lane.
    """
    if not any(steps.values()):
        raise ValueError("There is nothing to draw; give the intervals of a step.")
    figure, axes = single(0.9 + 0.62 * len(steps))
    looks = {what: {"color": hue} for what, hue in DOING_COLOURS.items()} | LINED
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
                left, right = i.begin * 1e3, i.end * 1e3
                look = {"linewidth": 0} | looks.get(i.what, {"color": GREY})
                axes.barh(y, right - left, high, left, align="edge", **look)
    name_rows(axes, steps)
    axes.set_xlabel(unit)
    seen = {i.what for step in steps.values() for i in step if i.end > i.begin}
    used = [what for what in looks if what in seen]
    names = {what: f"{what}ing" for what in LINED}
    alike = {
        ", ".join(names.get(w, w) for w in used if looks[w] == looks[what]): looks[what]
        for what in used
    }
    legend(figure, [Patch(label=label, **look) for label, look in alike.items()])
    return figure
