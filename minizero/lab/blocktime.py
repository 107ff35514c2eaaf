"""One block on one machine: what it computes, what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import traitlets

from .explorer import Explorable
from .lanes import PHASE_COLOURS
from .style import GREY, OP_COLOURS


class BlockTime(Explorable):
    """Forward and backward of a block under ZeRO-3 in bf16, at once and overlapped.

    tokens: a rank and step, 256 to 131,072.
    bandwidth: gigabytes a second that a rank sends, 1 to 1,000.
    speed: TFLOP/s of a rank, 10 to 2,000.
    ranks: 2 to 1,024.
    """

    _esm = Path(__file__).with_suffix(".js")

    tokens = traitlets.Int(2048, min=256, max=131_072).tag(sync=True)
    bandwidth = traitlets.Float(300, min=1, max=1000).tag(sync=True)
    speed = traitlets.Float(400, min=10, max=2000).tag(sync=True)
    ranks = traitlets.Int(8, min=2, max=1024).tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    def __init__(self, **controls: Any) -> None:
        unknown = set(controls) - set(self.class_trait_names(sync=True))
        if unknown:
            raise TypeError(f"The explorable has no control {min(unknown)!r}.")
        super().__init__(palette=PHASE_COLOURS | OP_COLOURS | {"": GREY}, **controls)

    def least_tokens(self) -> float:
        """Tokens from which communication hides: R / W · (N - 1) / N."""
        share = (self.ranks - 1) / self.ranks
        return self.speed * 1e12 / (self.bandwidth * 1e9) * share

    def fallback(self) -> str:
        return (
            f"<p>At {self.speed:g} TFLOP/s, {self.bandwidth:g} GB/s and {self.ranks} "
            f"ranks, communication hides from {self.least_tokens():,.0f} tokens a "
            "rank on.</p>"
        )


def blocktime(**controls: Any) -> BlockTime:
    """The explorable, with some controls set."""
    return BlockTime(**controls)
