"""Memory against time: a step of the GPT under each choice, measured and drawn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from minizero.lab.models.gpt import GPT, GPTConfig
from minizero.lab.plots.memory import COLUMNS
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    DASHES,
    GREY,
    LINES,
    STYLE,
    WIDTH,
    legend,
    single,
)
from minizero.memory.labels import label
from minizero.memory.tracker import Sample, Tracker

MARKERS = "o^sv"
OFFLOADED = "offloaded"

Apply = Callable[[nn.Module], object]
"""Prepares a model, for example with `recompute_units`."""


@dataclass
class Point:
    """What one choice costs.

    saved: bytes of activations on the device when the forward is over.
    peak: most bytes of activations on the device during a step; host: off it.
    flops: operations of the matrix products of a step.
    seconds: what each timed step took.
    """

    saved: int
    peak: int
    host: int
    flops: int
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(
    config: GPTConfig, batch: int, choices: Mapping[str, Apply], repeats: int = 0
) -> dict[str, Point]:
    """A point for each choice; its steps are timed in turns, a b c a b c.

    The bytes are those of a `Tracker`, the same on every run; the seconds are not.
    """
    x = torch.randint(config.vocabulary, (batch, config.sequence))
    models, points = {}, {}
    for name, apply in choices.items():
        models[name] = model = GPT(config)
        apply(model)
        points[name] = _count(model, x)
    for turn in range(repeats + 1):
        for name, model in models.items():
            start = time.perf_counter()
            model(x, x).backward()
            if turn:  # the first one warms up
                points[name].seconds.append(time.perf_counter() - start)
    return points


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


def _count(model: nn.Module, x: Tensor) -> Point:
    samples, peaks = activations_of_step(model, x)
    saved = next(s for s in samples if s.event == "backward").live["activations"]
    model.zero_grad()
    with FlopCounterMode(display=False) as counter:
        model(x, x).backward()
    return Point(saved, peaks["device"], peaks["host"], counter.get_total_flops())


@rc_context(STYLE)
def tradeoff(points: Mapping[str, Point]) -> Figure:
    """Peak of activations against operations, and against time, of each choice.

    Both costs are relative to the first choice; a bar spans the middle half of the
    turns. Lower left is better. Choices whose names are alike up to a comma share a
    colour and differ by their marks, which are hollow for what ends in "offloaded".
    """
    figure = Figure(figsize=(WIDTH, 3.4))
    names = list(points)
    first = points[names[0]]
    left, right = figure.subplots(1, 2, sharey=True)
    families = [name.partition(", ")[0] for name in names]
    colours = dict(zip(dict.fromkeys(families), LINES, strict=False))
    for i, (name, point) in enumerate(points.items()):
        look = {
            "color": colours[families[i]],
            "marker": MARKERS[families[:i].count(families[i]) % len(MARKERS)],
            "fillstyle": "none" if name.endswith(OFFLOADED) else "full",
        }
        y = point.peak / 1e6
        left.plot(point.flops / first.flops, y, linestyle="", label=name, **look)
        turns = zip(point.seconds, first.seconds, strict=True)
        ratios = [a / b for a, b in turns]
        low, mid, high = _quartiles(ratios)
        right.plot([low, high], [y, y], color=look["color"], linewidth=1.2)
        right.plot(mid, y, linestyle="", **look)
    left.set_ylabel("peak of activations, MB")
    left.set_xlabel("operations, relative")
    right.set_xlabel("time of a step, relative")
    left.set_ylim(0)
    legend(figure, left.get_legend_handles_labels()[0], columns=3)
    return figure


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, mid, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, mid, high


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
            axes.plot(
                x,
                y,
                linewidth=1.6,
                label=name if not part else None,
                color=CATEGORY_COLOURS["activations"],
                linestyle=DASHES[i % len(DASHES)],
            )
    axes.axvline(1, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set(xlim=(0, 2), ylabel="activations, MB")
    axes.set_ylim(0)
    axes.set_xticks([0.5, 1.5], ["forward", "backward"])
    axes.tick_params(bottom=False)
    axes.legend(loc="upper right")
    return figure
