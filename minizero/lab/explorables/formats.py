"""Floating-point formats: figures of their bits and ranges, and one to play with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from minizero.lab.explorables.base import Amount, Computed, Explorable, module
from minizero.lab.plots.style import (
    CATEGORY_COLOURS,
    GREY,
    LINES,
    STYLE,
    WIDTH,
    note,
    single,
)

FORMATS = {
    "fp32": (torch.float32, 8, 23),
    "bf16": (torch.bfloat16, 8, 7),
    "fp16": (torch.float16, 5, 10),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
    "fp8 e4m3": (torch.float8_e4m3fn, 4, 3),
}
"""By name: the dtype, and its bits of exponent and of significand."""

FIELDS = {"sign": GREY, "exponent": LINES[0], "significand": LINES[1]}


def spacing(dtype: torch.dtype, at: float) -> float:
    """From `at`, as `dtype` stores it, to the next larger number."""
    here = torch.tensor(at, dtype=dtype)
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    above = (here.view(integer) + 1).view(dtype)
    return above.item() - here.item()


def stored(value: float, name: str) -> float:
    """A positive value as a format has it; infinite where it is too large.

    PyTorch gives the largest number of e4m3 instead, which has no infinity.
    """
    dtype, _, digits = FORMATS[name]
    largest = torch.finfo(dtype).max
    half = 2.0 ** (math.floor(math.log2(largest)) - digits - 1)
    if value > largest + half:
        return math.inf
    return torch.tensor(value, dtype=torch.float64).to(dtype).item()


def bits(value: float, name: str) -> str:
    """The bits of a number that a format has; none of an infinite one."""
    dtype, *_ = FORMATS[name]
    raw = torch.tensor([value], dtype=torch.float64).to(dtype).view(torch.uint8)
    whole = "".join(f"{byte:08b}" for byte in reversed(raw.tolist()))
    return whole if math.isfinite(value) else ""


def smallest(dtype: torch.dtype) -> float:
    """The smallest number above 0, a subnormal."""
    return spacing(dtype, 0.0)


@rc_context(STYLE)
def bit_layout() -> Figure:
    """A row of boxes for each format, a box for each bit."""
    figure, axes = single(2.4)
    for y, (_, exponent, significand) in enumerate(FORMATS.values()):
        widths = {"sign": 1, "exponent": exponent, "significand": significand}
        x = 0
        for field, width in widths.items():
            for place in range(x, x + width):
                box = (place + 0.06, y - 0.34), 0.88, 0.68
                axes.add_patch(Rectangle(*box, color=FIELDS[field], linewidth=0))
            x += width
        label = f"{exponent} + {significand}"
        note(axes, label, (x, y), (6, 0), va="center")
    for field, colour in FIELDS.items():
        axes.add_patch(Rectangle((0, 0), 0, 0, color=colour, label=field))
    axes.set(xlim=(0, 36), ylim=(len(FORMATS) - 0.4, -0.6))
    axes.set_yticks(range(len(FORMATS)), list(FORMATS))
    axes.tick_params(left=False, bottom=False, labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.legend(loc="lower right")
    return figure


@rc_context(STYLE)
def exponents(values: Mapping[str, Tensor]) -> Figure:
    """A histogram a label: how many magnitudes have which power of two.

    What fp16 stores exactly enough, coarsely (subnormal), and not at all is marked;
    zeros are not counted. Raises ValueError if there is nothing to draw.
    """
    if not values:
        raise ValueError("There is nothing to draw; give at least one tensor.")
    figure = Figure(figsize=(WIDTH, 0.6 + 1.35 * len(values)))
    panels = figure.subplots(len(values), sharex=True, squeeze=False)[:, 0]
    tiny, least = torch.finfo(torch.float16).tiny, smallest(torch.float16)
    # half of the least number rounds to zero
    zero, subnormal, most = (
        torch.tensor([least / 2, tiny, torch.finfo(torch.float16).max]).log2().tolist()
    )
    low, high = -44, 18
    for axes, (name, tensor) in zip(panels, values.items(), strict=True):
        powers = tensor[tensor != 0].abs().float().log2().clamp(low, high)
        counts = torch.histc(powers, high - low, low, high) / max(powers.numel(), 1)
        face = CATEGORY_COLOURS["gradients"]
        places = torch.arange(low, high) + 0.5
        axes.bar(places.tolist(), (100 * counts).tolist(), 0.86, color=face)
        for edge in (zero, subnormal, most):
            axes.axvline(edge, color=GREY, linestyle=(0, (4, 2)), linewidth=1)
        lost = (powers < zero).float().mean().item()
        axes.set_title(f"{name}: {lost:.0%} below fp16", loc="left", fontsize=9.5)
        axes.set(ylabel="% of elements", xlim=(low, high))
        axes.margins(y=0.12)
    spans = {
        "zero in fp16": (low, zero),
        "coarse": (zero, subnormal),
        "fp16's normal range": (subnormal, most),
    }
    for text, (a, b) in spans.items():
        look: Any = {"y": "axes fraction", "ha": "center", "va": "top", "fontsize": 8.5}
        note(panels[0], text, ((a + b) / 2, 1), (0, -2), **look)
    panels[0].margins(y=0.3)
    panels[-1].set_xlabel("power of two")
    return figure


def described() -> list[dict[str, Any]]:
    """The formats, as a page needs to know them."""
    return [
        {
            "name": name,
            "exponent": exponent,
            "digits": digits,
            "lowest": round(torch.tensor(torch.finfo(dtype).tiny).log2().item()),
            "largest": torch.finfo(dtype).max,
        }
        for name, (dtype, exponent, digits) in FORMATS.items()
    ]


class FormatExplorer(Explorable):
    """A weight and an update, and what is left of them in each format.

    weight, update: powers of two, from -20 to 18 and from -30 to 16.
    """

    kind = "formats"
    _esm = module(kind)

    weight = Amount(0.0, -20, 18).tag(sync=True)
    update = Amount(-10.0, -30, 16).tag(sync=True)
    formats = Computed(described).tag(sync=True)

    def sums(self) -> dict[str, tuple[float, float]]:
        """By format: the weight as it has it, and the sum."""
        found = {}
        for name in FORMATS:
            before = stored(2.0**self.weight, name)
            found[name] = before, stored(before + 2.0**self.update, name)
        return found

    def kept(self) -> dict[str, float]:
        """By format: what the sum gained over the weight, as a share of the update."""
        update = 2.0**self.update
        return {name: (b - a) / update for name, (a, b) in self.sums().items()}

    def numbers(self) -> list[list[Any]]:
        """The share that each format keeps of the update, and the bits of the sum."""
        sums, kept = self.sums(), self.kept()
        return [[name, kept[name], bits(sums[name][1], name)] for name in FORMATS]

    def describe(self) -> str:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in self.kept().items())
        return f"2^{self.update:g} added to 2^{self.weight:g}: kept of it {shares}."
