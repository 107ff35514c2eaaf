"""Memory over a step: all of it by category, or the activations of several ways."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from minizero.lab.plots.narrow import set_upright
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    STYLE,
    amount,
    legend,
    line,
    note,
    single,
)
from minizero.memory.labels import CATEGORIES, label
from minizero.memory.tracker import Sample, Tracker

COLUMNS = 600
"""Most moments that `memory_over_step` draws, about one a pixel."""


@rc_context(STYLE)
def memory_over_step(samples: Sequence[Sample], budget: float | None = None) -> Figure:
    """Live bytes by category, stacked, from one allocation or free to the next.

    The samples stand at equal distances, not at their times: each change of memory
    has the same width, and the figure is the same on a fast and on a slow machine.
    Of more than :data:`COLUMNS` samples the highest of each group is drawn, so a
    peak is never lost. Marked samples get a line with their event and unit.
    """
    if not samples:
        raise ValueError("There are no samples; run the step inside a Tracker.")
    figure, axes = single(3.1)
    shown = _thin(samples)
    names = [c for c in CATEGORIES if any(s.live.get(c) for s in samples)]
    total = [0] * len(shown)
    for depth, name in enumerate(names):
        total = [
            t + samples[i].live.get(name, 0) for t, i in zip(total, shown, strict=True)
        ]
        # Each area reaches down to zero, and the next lower one covers it.
        x, y = _stairs(shown, total)
        face = CATEGORY_COLOURS[name]
        axes.fill(x, y, linewidth=0, zorder=1 - depth / 10, facecolor=face)
    peak = max(range(len(shown)), key=total.__getitem__)
    left = shown[peak] < len(samples) / 2
    side, shift = ("left", (5, 4)) if left else ("right", (-5, 4))
    text, at = f"peak {amount(total[peak])}", (shown[peak], total[peak])
    note(axes, text, at, shift, ha=side, fontweight="bold")
    highest = max(total[peak], budget or 0) or 1.0
    if budget is not None:
        axes.axhline(budget, color=GREY, linestyle=(0, (4, 2)), linewidth=1.4)
        text, right = f"budget {amount(budget)}", {"x": "axes fraction", "ha": "right"}
        note(axes, text, (1, budget), (0, 3), **right)
    _marks(axes, samples)
    axes.set_xlim(0, max(len(samples) - 1, 1))
    axes.set_ylim(0, highest * 1.12)
    axes.yaxis.set_major_formatter(lambda value, _: amount(value))
    axes.set_xlabel("allocations and frees, in order")
    axes.tick_params(bottom=False, labelbottom=False)
    legend(
        figure, [Patch(facecolor=CATEGORY_COLOURS[name], label=name) for name in names]
    )
    figure.draw_without_rendering()
    set_upright(axes, ExitStack())
    return figure


def _thin(samples: Sequence[Sample]) -> list[int]:
    """At most COLUMNS indices and the last one: of each group that with most bytes."""
    size = -(-len(samples) // COLUMNS)
    groups = (
        range(i, min(i + size, len(samples))) for i in range(0, len(samples), size)
    )
    kept = [max(group, key=lambda i: sum(samples[i].live.values())) for group in groups]
    return kept if kept[-1] == len(samples) - 1 else [*kept, len(samples) - 1]


def _stairs(x: Sequence[int], y: Sequence[float]) -> tuple[list[int], list[float]]:
    """Outline of the area under steps; equal neighbours are one step."""
    xs, ys = [x[0]], [0.0]
    for place, value in zip(x, y, strict=True):
        if value != ys[-1]:
            xs += [place, place]
            ys += [ys[-1], value]
    return [*xs, x[-1], x[-1]], [*ys, ys[-1], 0.0]


def _marks(axes: Axes, samples: Sequence[Sample]) -> None:
    """A line at each marked sample, and its name above."""
    named = [(i, f"{s.event} {s.unit}") for i, s in enumerate(samples) if s.event]
    for x, text in named:
        axes.axvline(x, ymax=0.89, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
        text, y = text.strip(), "axes fraction"
        note(axes, text, (x, 1), (0, 3), y=y, ha="left", fontsize=8.5)


def activations_of_step(
    model: nn.Module, x: Tensor
) -> tuple[list[Sample], dict[str, int]]:
    """The samples of one forward and backward, marked "backward" between them, and
    the peaks on the device and the host, above what was there before."""
    gc.collect()
    with Tracker(model) as tracker:
        label(x, "activations")
        before = tracker.live["activations"]
        loss = model(x, x)
        tracker.mark("backward")
        loss.backward()
        del loss
    samples = tracker.samples
    for sample in samples:
        sample.live["activations"] = max(0, sample.live["activations"] - before)
    start = next(i for i, s in enumerate(samples) if s.live["activations"])
    samples = samples[max(0, start - 1) :]
    peaks = {
        "device": max(s.live["activations"] for s in samples),
        "host": max(s.host.get("activations", 0) for s in samples),
    }
    return samples, peaks


@rc_context(STYLE)
def activation_curves(runs: Mapping[str, Sequence[Sample]]) -> Figure:
    """Live activations of each run over one step, with its backward marked.

    Each run's changes of memory stand at equal distances, forward in the left half
    and backward in the right.
    """
    figure, axes = single(3.1)
    for i, (name, samples) in enumerate(runs.items()):
        middle = next(i for i, s in enumerate(samples) if s.event == "backward")
        for part, (a, b) in enumerate(((0, middle), (middle, len(samples) - 1))):
            step = max(1, (b - a) // COLUMNS)
            places = [*range(a, b, step), b]
            x = [part + (place - a) / max(1, b - a) for place in places]
            y = [
                max(s.live["activations"] for s in samples[p : p + step]) / 1e6
                for p in places
            ]
            look = line(i) | {"color": CATEGORY_COLOURS["activations"]}
            axes.plot(x, y, label=None if part else name, linewidth=1.6, **look)
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set(xlim=(0, 2), ylabel="activations, MB")
    axes.set_ylim(0)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(bottom=False)
    axes.legend(loc="upper right")
    return figure
