"""An explorable: three all-reduces, step by step."""

from __future__ import annotations

from typing import Any

import traitlets

from minizero.lab.explorables.base import Explorable, module

WAYS = ("ring", "direct", "rank 0")


class Exchanges(Explorable):
    """Who holds whose sums, and what each rank has sent, after each step.

    way: "ring", "direct" or "rank 0", which adds everything itself.
    ranks: 2 to 8. step: from 0; beyond the last it stays at the last.
    """

    kind = "exchanges"
    _esm = module(kind)

    way = traitlets.Enum(WAYS, "ring").tag(sync=True)
    ranks = traitlets.Int(4, min=2, max=8).tag(sync=True)
    step = traitlets.Int(2, min=0).tag(sync=True)

    def numbers(self) -> list[list[Any]]:
        """What each rank has sent, as a share of the buffer."""
        n, last = self.ranks, 2 * (self.ranks - 1) if self.way == "ring" else 2
        step = min(self.step, last)
        if self.way == "rank 0":  # everybody to it, and it to everybody
            sent = [(n - 1.0) * (step == 2)] + [1.0 * (step > 0)] * (n - 1)
        else:
            sent = [step * (1 if self.way == "ring" else n - 1) / n] * n
        return [[f"rank {r}", share] for r, share in enumerate(sent)]

    def describe(self) -> str:
        return f"{self.way}, {self.ranks} ranks, after step {self.step}"
