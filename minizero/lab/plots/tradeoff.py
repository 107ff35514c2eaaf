"""The activations of a step: measured, and drawn over time."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence

from matplotlib import rc_context
from matplotlib.figure import Figure
from torch import Tensor, nn

from minizero.lab.plots.memory import COLUMNS
from minizero.lab.plots.style import CATEGORY_COLOURS, DASHES, GREY, STYLE, single
from minizero.memory.labels import label
from minizero.memory.tracker import Sample, Tracker


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
