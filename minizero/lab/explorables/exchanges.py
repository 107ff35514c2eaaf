"""An explorable: three all-reduces, step by step."""

from __future__ import annotations

import traitlets

from minizero.lab.explorables.base import Explorable, module

WAYS = ("ring", "direct", "rank 0")


class Exchanges(Explorable):
    """Who holds whose sums, and what each rank has sent, after each step.

    way: "ring", "direct" or "rank 0", which adds everything itself.
    ranks: 2 to 8. step: from 0; beyond the last it stays at the last.
    """

    _esm = module("exchanges.js")

    way = traitlets.Enum(WAYS, "ring").tag(sync=True)
    ranks = traitlets.Int(4, min=2, max=8).tag(sync=True)
    step = traitlets.Int(2, min=0).tag(sync=True)

    def describe(self) -> str:
        return f"{self.way}, {self.ranks} ranks, after step {self.step}"
