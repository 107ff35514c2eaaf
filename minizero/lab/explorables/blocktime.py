"""An explorable: one block on one machine, what it computes and what it waits for."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab.explorables.base import Amount, Explorable, look, module
from minizero.lab.hardware import H100
from minizero.lab.plots.lanes import PHASE_COLOURS
from minizero.lab.plots.style import GREY

PALETTE = {
    "forward": look(PHASE_COLOURS["forward"]),
    "backward": look(PHASE_COLOURS["backward"]),
    "waiting": look("transparent", GREY),
}


class BlockTime(Explorable):
    """Forward and backward of a block under ZeRO-3 in bf16, at once and overlapped.

    tokens: a rank and step, 256 to 131,072.
    bandwidth: gigabytes a second that a rank sends, 1 to 1,000.
    speed: TFLOP/s of a rank, 10 to 2,000.
    ranks: 2 to 1,024.
    """

    kind = "blocktime"
    _esm = module(kind)

    tokens = traitlets.Int(2048, min=256, max=131_072).tag(sync=True)
    bandwidth = Amount(H100.link / 1e9, 1, 1000).tag(sync=True)
    speed = Amount(round(H100.flops / 1e12), 10, 2000).tag(sync=True)
    ranks = traitlets.Int(H100.gpus, min=2, max=1024).tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    def times(self) -> tuple[float, float]:
        """Seconds a parameter: of computing forward, and of one gather in bf16."""
        share = (self.ranks - 1) / self.ranks
        computing = 2 * self.tokens / (self.speed * 1e12)
        return computing, 2 * share / (self.bandwidth * 1e9)

    def numbers(self) -> list[list[Any]]:
        """Seconds a parameter: forward, waiting, backward, waiting."""
        compute, move = self.times()
        wait = max(0.0, move - compute)
        return [
            ["at once", compute, move, 2 * compute, 2 * move],
            ["overlapped", compute, wait, 2 * compute, 2 * wait],
        ]

    def least_tokens(self) -> float:
        """Tokens from which communication hides: R / W · (N - 1) / N."""
        computing, moving = self.times()
        return self.tokens * moving / computing

    def describe(self) -> str:
        return (
            f"At {self.speed:g} TFLOP/s, {self.bandwidth:g} GB/s and {self.ranks} "
            f"ranks, communication hides from {self.least_tokens():,.0f} tokens a "
            "rank on."
        )


def blocktime(**controls: Any) -> BlockTime:
    """The explorable, with some controls set."""
    return BlockTime(**controls)
