"""Collectives over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.base import STYLE, legend, name_rows, single, waiting
from minizero.lab.plots.style import GREY, OP_COLOURS, ink

if TYPE_CHECKING:
    from minizero.comm.ledger import Call


@rc_context(STYLE)
def timeline(calls_by_rank: Mapping[int, Sequence[Call]] | Sequence[Any]) -> Figure:
    """One row a rank: each collective from its launch to its finish.

    The hatched end of a bar is the time that the rank spent waiting for it; the
    clear part ran beside computation. Calls that overlap are drawn below each other.

    calls_by_rank: the calls of each rank, by number or in order, as `launch` returns
        them. Their times are seconds of one clock.
    """
    ranks = dict(
        calls_by_rank.items()
        if isinstance(calls_by_rank, Mapping)
        else enumerate(calls_by_rank)
    )
    ranks = {r: [c for c in row if c.finished] for r, row in ranks.items()}
    calls = [call for row in ranks.values() for call in row]
    if not calls:
        raise ValueError("There are no calls; run a step inside comm.ledger().")
    start = min(call.launched for call in calls)
    figure, axes = single(0.9 + 0.5 * len(ranks))
    for y, row in enumerate(ranks.values()):
        lanes = _lanes(row)
        height = 0.8 / (max(lanes) + 1) if lanes else 0.8
        for call, lane in zip(row, lanes, strict=True):
            _call(axes, call, y - 0.4 + lane * height, height * 0.92, start)
    name_rows(axes, [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("milliseconds since the first launch")
    seen = [op for op in OP_COLOURS if any(call.op == op for call in calls)]
    patches = [Patch(facecolor=OP_COLOURS[op], label=op) for op in seen]
    legend(figure, [*patches, waiting()])
    return figure


def _lanes(calls: Sequence[Call]) -> list[int]:
    """For each call the first lane that is free when it is launched."""
    ends: list[float] = []
    lanes = []
    for call in calls:
        free = (i for i, end in enumerate(ends) if end <= call.launched)
        lane = next(free, len(ends))
        ends[lane : lane + 1] = [call.finished]
        lanes.append(lane)
    return lanes


def _call(axes: Axes, call: Call, y: float, height: float, start: float) -> None:
    begin, waited, end = (
        (t - start) * 1e3 for t in (call.launched, call.waited, call.finished)
    )
    face = OP_COLOURS.get(call.op, GREY)
    place: Any = {"y": y, "height": height, "align": "edge", "linewidth": 0}
    axes.barh(width=end - begin, left=begin, color=face, **place)
    if end > waited:
        edge = ink(face)
        place |= {"color": "none", "edgecolor": edge, "hatch": "//////"}
        axes.barh(width=end - waited, left=waited, **place)
