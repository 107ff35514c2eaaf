"""What offload moves, and when: formulas and figures for the chapters on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minizero.memory import PRECISIONS, Plan

from .plots import STYLE, WIDTH
from .style import CATEGORY_COLOURS, GREY, amount, ink


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


@dataclass(frozen=True)
class Bar:
    """One unit's time in one lane: "in", "update" or "out"; seconds."""

    lane: str
    unit: str
    start: float
    end: float


LANES = ("in", "update", "out")


def rounds(units: Mapping[str, Sequence[float]], pipelined: bool = True) -> list[Bar]:
    """When each unit comes in, is updated and goes out.

    units: seconds of the three, by unit. Pipelined, in(i+1), update(i) and out(i-1)
    run at once: a lane does one thing at a time, a unit goes through its three in
    order, and one comes in when the one before the last is out of its block. Else
    everything follows everything.
    """
    bars: list[Bar] = []
    free = dict.fromkeys(LANES, 0.0)
    gone = [0.0, 0.0]  # when the last but one unit, and the last, are out
    for unit, seconds in units.items():
        now = gone[0]
        for lane, taken in zip(LANES, seconds, strict=True):
            start = max(now, free[lane]) if pipelined else max(now, gone[1])
            now = free[lane] = start + taken
            bars.append(Bar(lane, unit, start, now))
        gone = [gone[1], now]
    return bars


@rc_context(STYLE)
def rounds_figure(runs: Mapping[str, Sequence[Bar]]) -> Figure:
    """A row of three lanes for each run, in milliseconds; units in the bars."""
    colours = {
        "in": CATEGORY_COLOURS["gradients"],
        "update": CATEGORY_COLOURS["optimizer"],
        "out": CATEGORY_COLOURS["parameters"],
    }
    figure = Figure(figsize=(WIDTH, 0.7 + 1.05 * len(runs)))
    last = max(bar.end for bars in runs.values() for bar in bars) * 1e3
    for place, (name, bars) in enumerate(runs.items(), 1):
        axes = figure.add_subplot(len(runs), 1, place)
        for bar in bars:
            face = colours[bar.lane]
            start, width = bar.start * 1e3, (bar.end - bar.start) * 1e3
            y = LANES.index(bar.lane)
            axes.barh(
                y, width, 0.8, start, color=face, edgecolor="#FFFFFF", linewidth=0.8
            )
            if width > last / 50:
                axes.text(
                    start + width / 2,
                    y,
                    bar.unit,
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color=ink(face),
                )
        end = max(bar.end for bar in bars) * 1e3
        axes.set_title(f"{name}: {end:.1f} ms", loc="left", fontsize=9.5, color=GREY)
        axes.set_yticks(range(3), LANES)
        axes.set(xlim=(0, last), ylim=(2.6, -0.6))
        axes.tick_params(left=False)
        if place < len(runs):
            axes.tick_params(labelbottom=False)
    axes.set_xlabel("milliseconds")
    return figure


@rc_context(STYLE)
def bus_figure(plans: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """What crosses the bus: a bar to the left is down to the host, to the right up.

    plans: by name the bytes a parameter by category, down and up.
    """
    figure = Figure(figsize=(WIDTH, 0.9 + 0.42 * len(plans)))
    axes = figure.add_subplot()
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
            _total(axes, left, y, sign)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(plans)), list(plans))
    axes.set(ylim=(len(plans) - 0.5, -0.7), xlim=(-1.3 * longest, 1.3 * longest))
    axes.set_xticks([])
    axes.tick_params(left=False)
    for side in ("bottom", "left"):
        axes.spines[side].set_visible(False)
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


def _total(axes: Axes, x: float, y: int, sign: int) -> None:
    axes.annotate(
        amount(abs(x)),
        (x, y),
        xytext=(5 * sign, 0),
        textcoords="offset points",
        ha="left" if sign > 0 else "right",
        va="center",
        fontweight="bold",
    )
