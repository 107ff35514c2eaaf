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


def test_explorer() -> None:
    explorer = FormatExplorer(weight=0.0, update=-10.0)
    assert explorer.kept() == {
        "fp32": 1.0, "bf16": 0.0, "fp16": 1.0, "fp8 e5m2": 0.0, "fp8 e4m3": 0.0,
    }  # fmt: skip
    assert "bf16 0%" in repr(explorer) and "bf16 0%" in explorer.fallback()
    assert "weight + update" in explorer.static_html()
    tiny = FormatExplorer(weight=-19.0, update=-26.0).kept()
    assert (tiny["bf16"], tiny["fp16"]) == (1.0, 0.0)
    with pytest.raises(traitlets.TraitError):
        FormatExplorer(weight=30.0)
