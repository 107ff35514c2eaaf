"""One palette for figures and explorables, and what they write beside it.

The colours start from Okabe and Ito's set (2008), moved until they are also told
apart in greyscale: at least 11 apart in lightness (CIE L*), and 20 apart in colour
(CIE 1976) to normal, protan, deutan and tritan eyes. `tests/test_lab.py` computes it.
"""

from __future__ import annotations

from minizero.memory.amounts import amount as amount
from minizero.memory.amounts import short as short

CATEGORY_COLOURS = {
    "parameters": "#0460A9",
    "gradients": "#ECAB25",
    "optimizer": "#2AAB7F",
    "activations": "#A46694",
    "buffers": "#E6EE7F",
}
"""A colour for each of `minizero.memory.CATEGORIES`."""

CATEGORY_HATCHES = {
    "parameters": "",
    "gradients": "//",
    "optimizer": "",
    "activations": "\\\\",
    "buffers": "..",
}
"""A second cue beside the colour, for print."""

OP_COLOURS = {
    "all_gather": "#0460A9",
    "reduce_scatter": "#ECAB25",
    "broadcast": "#2AAB7F",
    "all_reduce": "#A46694",
    "barrier": "#E6EE7F",
}
"""A colour for each collective: what gathers parameters has the parameters' colour."""

LINES = ("#0460A9", "#ECAB25", "#A46694", "#2AAB7F")
"""Colours that are strong enough for a thin line; a rank or a run takes one each."""

GREY = "#797979"
"""Text and axes: it stands out from white and from the dark theme's page alike."""


def luminance(colour: str) -> float:
    """Relative luminance of "#RRGGBB", 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """Black or white, whichever reads better on `fill`."""
    return max("#000000", "#FFFFFF", key=lambda colour: contrast(colour, fill))
