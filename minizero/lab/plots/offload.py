"""What offload moves, and when: formulas and figures for the chapters on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.lab.plots.base import STYLE, end_label, name_rows, no_numbers, single
from minizero.lab.plots.lanes import stacked
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY, amount
from minizero.memory.plan import PRECISIONS, Plan
from minizero.overlap.machine import Interval


def crossing(
    plan: Plan, precision: str = "fp32", micro_batches: int = 1
) -> tuple[int, int]:
    """Bytes a sharded parameter that cross the bus in a step: (down, up).

    Down is to the host. Every micro-batch sends its gradients to where they rest and
    fetches parameters twice, before the forward and before the backward. The update
    fetches what rests away from the optimizer's states: gradients, and where there are
    no master weights the parameters too, which go back in either case.
    """
    parameter, gradient, master = PRECISIONS[precision]
    away = {
        name: getattr(plan, name).on != plan.optimizer.on
        for name in ("parameters", "gradients")
    }
    inward = gradient * away["gradients"]
    inward += parameter * (away["parameters"] and not master)
    outward = parameter * away["parameters"]
    down = micro_batches * gradient * (plan.gradients.on != "device")
    up = micro_batches * 2 * parameter * (plan.parameters.on != "device")
    if plan.optimizer.on == "device":
        return down + outward, up + inward
    return down + inward, up + outward


LANES = {
    "in": CATEGORY_COLOURS["gradients"],
    "update": CATEGORY_COLOURS["optimizer"],
    "out": CATEGORY_COLOURS["parameters"],
}
"""What happens to a unit, in this order, and the colour of its lane."""


def rounds(
    units: Mapping[str, Sequence[float]], pipelined: bool = True
) -> list[Interval]:
    """When each unit comes in, is updated and goes out.

    units: seconds of the three, by unit. Pipelined, in(i+1), update(i) and out(i-1)
    run at once: a lane does one thing at a time, a unit goes through its three in
    order, and one comes in when the one before the last is out of its block. Else
    everything follows everything.
    """
    bars: list[Interval] = []
    free = dict.fromkeys(LANES, 0.0)
    gone = [0.0, 0.0]  # when the last but one unit, and the last, are out
    for unit, seconds in units.items():
        now = gone[0]
        for lane, taken in zip(LANES, seconds, strict=True):
            start = max(now, free[lane]) if pipelined else max(now, gone[1])
            now = free[lane] = start + taken
            bars.append(Interval(lane, lane, unit, start, now))
        gone = [gone[1], now]
    return bars


def rounds_figure(runs: Mapping[str, Sequence[Interval]]) -> Figure:
    """A row of three lanes for each run, in milliseconds; units in the bars."""
    return stacked(runs, LANES)


@rc_context(STYLE)
def bus_figure(plans: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """What crosses the bus: a bar to the left is down to the host, to the right up.

    plans: by name the bytes a parameter by category, down and up.
    """
    figure, axes = single(0.9 + 0.42 * len(plans))
    longest = max(sum(way.values()) for ways in plans.values() for way in ways)
    used = []
    for y, ways in enumerate(plans.values()):
        for sign, way in zip((-1, 1), ways, strict=True):
            left = 0.0
            for category, nbytes in way.items():
                face = CATEGORY_COLOURS[category]
                used.append(category)
                axes.barh(y, sign * nbytes, 0.62, left, color=face)
                left += sign * nbytes
            end_label(axes, left, y, amount(abs(left)), sign)
    axes.axvline(0, color=GREY, linewidth=0.8)
    name_rows(axes, plans)
    no_numbers(axes)
    axes.set(ylim=(len(plans) - 0.5, -0.7), xlim=(-1.3 * longest, 1.3 * longest))
    axes.spines["left"].set_visible(False)
    for x, text in ((-0.5, "down to the host"), (0.5, "up to the device")):
        axes.text(x * longest, -0.75, text, ha="center", va="bottom")
    figure.legend(
        handles=[
            Patch(facecolor=colour, label=category)
            for category, colour in CATEGORY_COLOURS.items()
            if category in used
        ],
        loc="outside lower center",
        ncols=len(CATEGORY_COLOURS),
    )
    return figure
