"""An explorable: computing and communicating for one unit in one step, in bf16."""

from __future__ import annotations

import traitlets

from minizero.lab import hardware
from minizero.lab.explorables.base import Explorable, look, module
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

    _esm = module("stepcost.js")

    tokens = traitlets.Float(8192, min=256, max=262_144).tag(sync=True)
    bandwidth = traitlets.Float(hardware.H100.network / 1e9, min=1, max=1000).tag(
        sync=True
    )
    latency = traitlets.Float(30, min=1, max=1000).tag(sync=True)
    unit = traitlets.Float(200, min=0.1, max=3200).tag(sync=True)
    compute = traitlets.Float(hardware.H100.flops / 1e12, min=10, max=1600).tag(
        sync=True
    )
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

    def describe(self) -> str:
        work, _, sent = self.times()
        return f"ZeRO-3 communicates for {sent / work:.2f} of the computing time."
