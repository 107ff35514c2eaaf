"""Four plans, one playhead: a step under each plan, on one time and one memory axis."""

from __future__ import annotations

from functools import cache
from typing import Any

import traitlets

from minizero.lab.explorables.base import Amount, Explorable, module
from minizero.lab.explorables.packing import Pack, unpacked_moments
from minizero.lab.explorables.steps import TICK, Setting, Size, simulated
from minizero.lab.explorables.timeline import CATEGORIES, PLANS, VERBS
from minizero.lab.plots.style import amount
from minizero.scale.shapes import Shape

SIZE = Size(Shape(layers=34, hidden=4096, heads=32, vocab=37_373), ranks=8)
"""7 billion parameters on 8 A100s, each in a host of its own."""
CAPACITY = 80e9


@cache
def steps() -> dict[str, Any]:
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
    steps = traitlets.Dict().tag(sync=True)
    plans = traitlets.List(list(PLANS)).tag(sync=True)
    capacity = traitlets.Float(CAPACITY).tag(sync=True)
    verbs = traitlets.Dict(VERBS).tag(sync=True)
    categories = traitlets.Dict(CATEGORIES).tag(sync=True)

    @traitlets.default("steps")
    def _steps(self) -> dict[str, Any]:
        return steps()

    def numbers(self) -> list[list[Any]]:
        """Of each plan: bytes now, between steps and at most; its ms; bytes sent."""
        tables, found = self.steps["tables"], []
        every = [unpacked_moments(tables, one) for one in self.steps["traces"]]
        now = self.moment * max(total for _, total in every)
        for name, packed, (lines, total) in zip(
            PLANS, self.steps["traces"], every, strict=True
        ):
            kinds = (tables["slices"][kind] for kind in packed["slices"][1::4])
            sent = sum(nbytes for *_, nbytes, _, joined in kinds if joined)
            held, rows = 0, []
            for _, time, changes in lines:
                held += sum(n for place, _, _, n in changes if place == "device")
                rows.append((time, held))
            then = [held for time, held in rows if time <= now][-1]
            most = max(held for _, held in rows)
            ms = round(1e3 * total * tables["tick"])
            found.append([name, then, rows[0][1], most, ms, sent])
        return found

    def describe(self) -> str:
        most = ", ".join(f"{name} {amount(n)}" for name, *_, n, _, _ in self.numbers())
        return f"Bytes on each of {SIZE.ranks} GPUs in a step, at most: {most}."
