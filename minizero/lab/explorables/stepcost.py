"""An explorable: computing and communicating for one unit in one step, in bf16."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab import hardware
from minizero.lab.explorables.base import Amount, Explorable, look, module
from minizero.lab.plots.style import LINES

PALETTE = {
    "computation": look(LINES[2]),
    "ZeRO-2 sends": look(LINES[3]),
    "ZeRO-3 sends": look(LINES[0]),
}


class StepCost(Explorable):
    """What ZeRO-2 and ZeRO-3 send for a unit, beside the time of computing it.

    tokens: of a micro-batch, 256 to 262,144.
    bandwidth: gigabytes a second that a rank sends, 1 to 1,000.
    latency: microseconds of a call, 1 to 1,000.
    unit: millions of parameters, 0.1 to 3,200.
    compute: TFLOP/s of a rank, 10 to 1,600.

    It opens with an H100 and its network.
    """

    kind = "stepcost"
    _esm = module(kind)

    tokens = Amount(8192, 256, 262_144).tag(sync=True)
    bandwidth = Amount(hardware.H100.network / 1e9, 1, 1000).tag(sync=True)
    latency = Amount(30, 1, 1000).tag(sync=True)
    unit = Amount(200, 0.1, 3200).tag(sync=True)
    compute = Amount(hardware.H100.flops / 1e12, 10, 1600).tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    def times(self) -> tuple[float, float, float]:
        """Seconds: of computing, and of what ZeRO-2 and ZeRO-3 send.

        Six operations a parameter and token; two calls of 2 bytes a parameter under
        ZeRO-2, three under ZeRO-3, (N - 1) / N taken as 1.
        """
        elements = self.unit * 1e6
        call = 2 * elements / (self.bandwidth * 1e9) + self.latency / 1e6
        work = 6 * elements * self.tokens / (self.compute * 1e12)
        return work, 2 * call, 3 * call

    def numbers(self) -> list[list[Any]]:
        """Seconds of each part."""
        return [list(pair) for pair in zip(PALETTE, self.times(), strict=True)]

    def describe(self) -> str:
        work, _, sent = self.times()
        return f"ZeRO-3 communicates for {sent / work:.2f} of the computing time."
