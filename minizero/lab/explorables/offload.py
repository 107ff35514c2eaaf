"""An explorable: how much of a step is computing when state lies off the device."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab import hardware
from minizero.lab.explorables.base import Amount, Explorable, look, module
from minizero.lab.plots.style import CATEGORY_COLOURS, GREY
from minizero.memory.intensity import efficiency, intensity

STATES = {
    "parameters": "parameters, gradients",
    "optimizer": "optimizer states",
    "activations": "activation inputs",
}
"""What can lie off the device, as `intensity` calls it, and in words."""

PALETTE = {
    **{STATES[name]: look(CATEGORY_COLOURS[name]) for name in STATES},
    "waiting": look("transparent", GREY),
}


class OffloadEfficiency(Explorable):
    """The share of a step that is computing, for each state and each place.

    ZeRO-Infinity's formula (Rajbhandari et al. 2021, sec. 4), which overlaps nothing
    and counts only what that one state moves.

    batch: sequences of a rank and step, 1 to 4,096. sequence: tokens of each, 128 to
        131,072. hidden: 256 to 65,536.
    bus, disk: gigabytes a second of a GPU to its host and to its share of the disks,
        1 to 1,000 and 0.1 to 100.
    speed: TFLOP/s of a GPU while it computes, 10 to 2,000.
    """

    kind = "offload"
    _esm = module(kind)

    batch = traitlets.Int(16, min=1, max=4096).tag(sync=True)
    sequence = traitlets.Int(2048, min=128, max=131_072).tag(sync=True)
    hidden = traitlets.Int(4096, min=256, max=65_536).tag(sync=True)
    bus = Amount(hardware.H100.pcie / 1e9, 1, 1000).tag(sync=True)
    disk = Amount(hardware.H100.disk / 1e9, 0.1, 100).tag(sync=True)
    speed = Amount(hardware.H100.flops / 1e12, 10, 2000).tag(sync=True)
    palette = traitlets.Dict(PALETTE).tag(sync=True)

    def numbers(self) -> list[list[Any]]:
        """The share of computing, by state: from the host, and from the disk."""
        peak = self.speed * 1e12
        rows = []
        for name, title in STATES.items():
            ait = intensity(name, self.sequence, self.batch, self.hidden)
            shares = (efficiency(ait, x * 1e9, peak) for x in (self.bus, self.disk))
            rows.append([title, *shares])
        return rows

    def least_tokens(self) -> tuple[float, float]:
        """Tokens a step from which half of it is computing, with Adam's states off.

        Over the bus, and to the disk.
        """
        ait = intensity("optimizer", 1, 1)
        bus, disk = (self.speed * 1e12 / (ait * x * 1e9) for x in (self.bus, self.disk))
        return bus, disk

    def describe(self) -> str:
        bus, disk = self.least_tokens()
        return (
            f"With Adam's states off the device, half of a step is computing from "
            f"{bus:,.0f} tokens over the bus, and from {disk:,.0f} to the disk."
        )
