"""Figures for the chapter on the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from minizero.config import Config
from minizero.lab.plots.base import STYLE, WIDTH, line, name_rows, single
from minizero.lab.plots.lanes import PHASE_COLOURS
from minizero.lab.plots.style import GREY


def config_map(config: Config) -> Figure:
    """Which keys of a config decide which object, and what that is then."""
    return arrows(decisions(config), ("keys of the config", "what they decide"))


@rc_context(STYLE)
def arrows(rows: Sequence[tuple[str, str, str]], titles: tuple[str, str]) -> Figure:
    """A row each: code, an arrow, and to the right a name and what is said of it."""
    figure, axes = single(0.65 + 0.46 * len(rows))
    arrow = {"arrowstyle": "-|>", "color": GREY, "linewidth": 1.2}
    for x, title in zip((0.0, 0.49), titles, strict=True):
        axes.text(x, -0.85, title, fontstyle="italic")
    for y, (keys, made, what) in enumerate(rows):
        code: Any = {"family": "monospace", "fontsize": 8.5, "va": "center"}
        axes.text(0.0, y, keys, ha="left", **code)
        axes.annotate(
            "", (0.475, y), (0.425, y), arrowprops=arrow, annotation_clip=False
        )
        axes.text(0.49, y - 0.2, made, va="center", fontweight="bold")
        axes.text(0.49, y + 0.2, what, va="center", fontsize=8.5)
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -1.1))
    axes.axis("off")
    return figure


def decisions(config: Config) -> list[tuple[str, str, str]]:
    """Rows of the map: keys, the class or argument that they decide, and how."""
    zero, dtypes = config.zero_optimization, config.dtypes
    sharded = [n for n, place in vars(config.plan).items() if place.sharded]
    places: dict[str, list[str]] = {}
    for name, place in vars(config.plan).items():
        places.setdefault(place.on, []).append(name)
    places.pop("device", None)
    off = [f"{', '.join(names)} on {on}" for on, names in places.items()]
    home = "NVMe" if "nvme" in places else "Offload" if places else "Home"
    schedule = "reductions wait late" if zero.overlap_comm else "waits at once"
    kept = []
    if zero.overlap_comm and zero.stage == 3:
        schedule = f"gathers {zero.stage3_prefetch_bucket_size:,} elements ahead"
        threshold = zero.stage3_param_persistence_threshold
        kept = [
            (
                "stage3_param_persistence_threshold",
                "Overlap(param_persistence_threshold=...)",
                f"units below {threshold:,} elements stay whole",
            )
        ]
    scaled = config.fp16.enabled and not config.fp16.loss_scale
    scale = f", first scale 2^{config.fp16.initial_scale_power}" if scaled else ""
    wide = dtypes == ("float32", "float32", None)
    clipped = config.gradient_clipping
    return [
        (
            "train_batch_size\ngradient_accumulation_steps",
            "Accumulation",
            f"{config.train_micro_batch_size_per_gpu} samples a rank, "
            f"{config.gradient_accumulation_steps} times, {config.world_size} ranks",
        ),
        (
            "zero_optimization.stage",
            "Plan",
            f"sharded: {', '.join(sharded) or 'nothing'}",
        ),
        (
            "offload_optimizer, offload_param\naio",
            home,
            "; ".join(off) or "all on the device",
        ),
        (
            "fp16, bf16\ncommunication_data_type",
            "Precision" if wide else "MixedPrecision",
            "fp32 throughout" if wide else f"{dtypes.parameters}{scale}",
        ),
        (
            "overlap_comm\nstage3_prefetch_bucket_size",
            "Overlap" if zero.overlap_comm else "Schedule",
            schedule,
        ),
        *kept,
        (
            "reduce_bucket_size",
            "parallelize(bucket_size=...)",
            f"reductions of at most {zero.reduce_bucket_size:,} elements",
        ),
        (
            "gradient_clipping",
            "EngineOptimizer",
            f"norm at most {clipped:g}" if clipped else "no clipping",
        ),
        (
            "optimizer, scheduler",
            "torch.optim, lr_schedules",
            ", ".join(
                part.type for part in (config.optimizer, config.scheduler) if part
            )
            or "those given to initialize",
        ),
    ]


@rc_context(STYLE)
def phase_bars(runs: Mapping[str, Mapping[str, float]]) -> Figure:
    """A bar a run: the milliseconds of forward, backward and step, stacked.

    What is called "outside" is a clear part: of the step, and of none of the three.
    """
    if not runs:
        raise ValueError("There is nothing to draw; give the phases of a run.")
    figure, axes = single(0.9 + 0.42 * len(runs))
    colours = PHASE_COLOURS | {"step": PHASE_COLOURS["update"], "outside": "none"}
    labels: set[str] = set()
    for y, phases in enumerate(runs.values()):
        start = 0.0
        for name, length in phases.items():
            label = "" if name in labels else name
            edge = GREY if name == "outside" else "none"
            axes.barh(
                y, length, 0.62, start, color=colours[name], edgecolor=edge, label=label
            )
            labels.add(name)
            start += length
    name_rows(axes, runs)
    axes.set_xlabel("milliseconds a step")
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


@rc_context(STYLE)
def rate_curves(*panels: Mapping[str, Sequence[float]]) -> Figure:
    """A line a schedule: the learning rate of updates 1, 2, ...; in panels."""
    if not (panels and all(panels)):
        raise ValueError("There is nothing to draw; give the rates of a schedule.")
    figure = Figure(figsize=(WIDTH, 3.2))
    (row,) = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for axes, rates in zip(row, panels, strict=True):
        for i, (name, used) in enumerate(rates.items()):
            axes.plot(range(1, len(used) + 1), used, label=name, **line(i))
        axes.set(xlabel="update", ylim=(0, None))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), handlelength=2.6)
    row[0].set_ylabel("learning rate")
    return figure
