"""Small charts: losses, rates, libraries side by side, runs against predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from minizero.config import Config
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    LINES,
    STYLE,
    WIDTH,
    end_label,
    line,
    name_rows,
    no_numbers,
    single,
)


@rc_context(STYLE)
def loss_curves(
    curves: Mapping[str, Sequence[float] | Mapping[int, float]], ylabel: str = "loss"
) -> Figure:
    """A line a run; runs that are equal, number for number, share one.

    curves: by name, the loss of steps 1, 2, ... or a loss by step.
    """
    runs: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, losses in curves.items():
        steps = losses if isinstance(losses, Mapping) else dict(enumerate(losses, 1))
        points = tuple((int(step), float(loss)) for step, loss in steps.items())
        if not points:
            raise ValueError(f"The run {name!r} has no losses; give at least one.")
        runs.setdefault(points, []).append(name)
    figure, axes = single(3.1)
    lines = {}
    for i, (points, names) in enumerate(runs.items()):
        x, y = zip(*points, strict=True)
        (lines[points],) = axes.plot(
            x,
            y,
            linewidth=1.8,
            marker="o" if len(x) == 1 else "",
            label=" = ".join(names),
            **line(i),
        )
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(ylabel)
    # A loss falls, so this corner is free; the names stand in the lines' order.
    last = sorted(runs, key=lambda points: points[-1][1], reverse=True)
    handles = [lines[points] for points in last]
    axes.legend(handles=handles, loc="upper right", handlelength=2.6)
    return figure


@rc_context(STYLE)
def traffic_bars(
    moved: Mapping[str, tuple[float, float]], floor: float, unit: str
) -> Figure:
    """A bar a way of doing the same: what it reads, then what it writes.

    moved: (read, written), by name. floor: the least of both together, a dashed line.
    """
    figure, axes = single(0.42 * len(moved) + 0.55)
    for row, (read, written) in enumerate(moved.values()):
        axes.barh(row, read, color=CATEGORY_COLOURS["parameters"], height=0.62)
        axes.barh(
            row, written, left=read, color=CATEGORY_COLOURS["gradients"], height=0.62,
            hatch="//", edgecolor=GREY, linewidth=0,
        )  # fmt: skip
        end_label(axes, read + written, row, f"{read + written:.4g}")
    axes.axvline(floor, color=GREY, linestyle=(0, (5, 2)), linewidth=1.2)
    name_rows(axes, moved)
    no_numbers(axes)
    axes.set_title(
        f"{unit}: read (solid), written (striped); dashed: the least",
        loc="left",
        fontsize=9.5,
    )
    return figure


Values = dict[str, list[float]]


def measured(comparisons: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Values]]:
    """Values by what was measured, by job, by library, each turn's.

    comparisons: those of a benchmark's JSON, named "what: job".
    """
    found: dict[str, dict[str, Values]] = {}
    for one in comparisons:
        what, _, job = one["name"].partition(": ")
        values = found.setdefault(what, {}).setdefault(job, {})
        values |= {one["a"]: one["a_values"], one["b"]: one["b_values"]}
    return found


@rc_context(STYLE)
def peer_bars(values: Mapping[str, Sequence[float]], order: Sequence[str]) -> Figure:
    """A bar a library as long as its median, and a line from its least to its most.

    values: milliseconds of each turn, by library. order: of the rows; what was not
    measured is left out.
    """
    rows = [name for name in order if name in values]
    figure, axes = single(0.34 * len(rows) + 0.3)
    for row, name in enumerate(rows):
        turns = values[name]
        kind = "parameters" if name.startswith("minizero") else "gradients"
        axes.barh(row, median(turns), color=CATEGORY_COLOURS[kind], height=0.62)
        axes.plot([min(turns), max(turns)], [row, row], color=GREY, linewidth=1.4)
        end_label(axes, max(turns), row, f"{median(turns):,.0f}")
    axes.axvline(0, color=GREY, linewidth=0.8)
    name_rows(axes, rows)
    no_numbers(axes)
    return figure


def peer_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown; all columns but the first are numbers."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


MARKERS = "osD^x"


@rc_context(STYLE)
def against(
    rates: Mapping[str, Sequence[tuple[float, float]]],
    memories: Sequence[tuple[float, float]],
) -> Figure:
    """Two panels: tokens a second and GPU, and GiB; across measured, up predicted.

    rates: (measured, predicted) by where the rows come from. A grey band is 12 % wide
    to either side of what would be exact.
    """
    figure = Figure(figsize=(WIDTH, 3.1))
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for (name, pairs), colour, marker in zip(
        rates.items(), (*LINES, GREY), MARKERS, strict=False
    ):
        x, y = zip(*pairs, strict=True)
        left.loglog(x, y, marker, color=colour, markersize=3.5, alpha=0.8, label=name)
    right.plot(*zip(*memories, strict=True), "s", color=LINES[1], markersize=5)
    for axes, title in (
        (left, "tokens a second and GPU"), (right, "GiB of a GPU at the peak"),
    ):  # fmt: skip
        low, high = axes.get_xlim()
        ends = [low, high]
        axes.plot(ends, ends, color=GREY, linewidth=0.8)
        axes.fill_between(
            ends, [0.88 * n for n in ends], [1.12 * n for n in ends],
            color=GREY, alpha=0.2, linewidth=0,
        )  # fmt: skip
        axes.set_title(title, fontsize=9.5, loc="left")
        axes.set_xlabel("measured")
    left.set_ylabel("predicted")
    left.legend(loc="upper left", fontsize=8.5)
    return figure


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
