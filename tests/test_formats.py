"""The figures and the explorable of floating-point formats."""

from __future__ import annotations

import pytest
import torch
import traitlets

from minizero.lab.explorables import formats
from minizero.lab.explorables.formats import FORMATS, FormatExplorer


@pytest.mark.parametrize("name", FORMATS)
def test_bits_and_spacing(name: str) -> None:
    dtype, exponent, significand = FORMATS[name]
    assert 1 + exponent + significand == 8 * dtype.itemsize
    assert formats.spacing(dtype, 1.0) == 2.0**-significand == torch.finfo(dtype).eps
    least = formats.smallest(dtype)
    assert torch.tensor(least, dtype=dtype).item() == least > 0
    # half of it is a tie, and zero is the even one
    assert torch.tensor(least / 2).to(dtype).item() == 0


def test_exponents() -> None:
    figure = formats.exponents({"a": torch.tensor([2.0**-30, 1.0, 1.5, 0.0])})
    (axes,) = figure.axes
    assert axes.get_title("left") == "a: 33% below fp16"
    heights = {
        round(bar.get_x() + 0.43 - 0.5): bar.get_height() for bar in axes.patches
    }
    assert heights[0] == pytest.approx(200 / 3) and heights[-30] == pytest.approx(
        100 / 3
    )
    with pytest.raises(ValueError, match="nothing to draw"):
        formats.exponents({})


def test_bit_layout_has_a_box_for_each_bit() -> None:
    boxes = [p for p in formats.bit_layout().axes[0].patches if p.get_width() > 0]
    assert len(boxes) == sum(8 * dtype.itemsize for dtype, *_ in FORMATS.values())


def test_explorer() -> None:
    explorer = FormatExplorer(weight=0.0, update=-10.0)
    assert explorer.kept() == {
        "fp32": 1.0, "bf16": 0.0, "fp16": 1.0, "fp8 e5m2": 0.0, "fp8 e4m3": 0.0,
    }  # fmt: skip
    assert "bf16 0%" in repr(explorer) and "<td>bf16</td>" in explorer.fallback()
    assert "weight + update" in explorer.static_html()
    tiny = FormatExplorer(weight=-19.0, update=-26.0).kept()
    assert (tiny["bf16"], tiny["fp16"]) == (1.0, 0.0)
    with pytest.raises(traitlets.TraitError):
        FormatExplorer(weight=30.0)
