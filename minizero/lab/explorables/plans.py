"""Four plans, one playhead: a step under each plan, on one time and one memory axis."""

from __future__ import annotations

from functools import cache
from typing import Any

import traitlets

from minizero.lab.explorables.base import Amount, Computed, Explorable, module
from minizero.lab.explorables.packing import Pack, unpacked
from minizero.lab.explorables.steps import TICK, Setting, Size, simulated
from minizero.lab.explorables.timeline import CATEGORIES, PLANS, VERBS
from minizero.lab.plots.style import amount
from minizero.scale.shapes import Shape

SIZE = Size(Shape(layers=34, hidden=4096, heads=32, vocab=37_373), ranks=8)
"""7 billion parameters on 8 A100s, each in a host of its own."""
CAPACITY = 80e9


@cache
def four_steps() -> dict[str, Any]:
    """The simulated step of the four plans: each call is waited for at once."""
    pack = Pack(TICK)
    every = [simulated(Setting(stage, checkpointing=True), SIZE) for stage in range(4)]
    return {"traces": [pack.add(trace) for trace in every], "tables": pack.tables()}


class Plans(Explorable):
    """A step of a 7-billion model on 8 GPUs under data parallelism and ZeRO-1, 2, 3.

    moment: share of the longest step that is over, 0 to 1.
    """

    kind = "plans"
    _esm = module(kind)

    moment = Amount(0.3, 0, 1).tag(sync=True)
    steps = Computed(four_steps).tag(sync=True)
    plans = traitlets.List(list(PLANS)).tag(sync=True)
    capacity = traitlets.Float(CAPACITY).tag(sync=True)
    verbs = traitlets.Dict(VERBS).tag(sync=True)
    categories = traitlets.Dict(CATEGORIES).tag(sync=True)

    def numbers(self) -> list[list[Any]]:
        """Of each plan: bytes now, between steps and at most; its ms; bytes sent."""
        tables, found = self.steps["tables"], []
        every = [unpacked(tables, one) for one in self.steps["traces"]]
        now = self.moment * max(total for _, total in every)
        for name, packed, (trace, total) in zip(
            PLANS, self.steps["traces"], every, strict=True
        ):
            kinds = (tables["slices"][kind] for kind in packed["slices"][1::4])
            sent = sum(nbytes for *_, nbytes, _, joined in kinds if joined)
            # all of it is on the device
            held = [(time, sum(live.values())) for time, live in trace.live(0)]
            then = [nbytes for time, nbytes in held if time <= now][-1]
            ms = round(1e3 * total * tables["tick"])
            found.append([name, then, held[0][1], trace.peak(0), ms, sent])
        return found

    def describe(self) -> str:
        most = ", ".join(f"{name} {amount(n)}" for name, *_, n, _, _ in self.numbers())
        return f"Bytes on each of {SIZE.ranks} GPUs in a step, at most: {most}."
