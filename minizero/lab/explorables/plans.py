"""Four plans, one playhead: a step under each plan, on one time and one memory axis."""

from __future__ import annotations

from functools import cache
from typing import Any

import traitlets

from minizero.lab.explorables.base import Amount, Explorable, module, table
from minizero.lab.explorables.packing import Pack
from minizero.lab.explorables.steps import TICK, Setting, simulated
from minizero.lab.explorables.timeline import CATEGORIES, PLANS, VERBS, unpacked_moments
from minizero.lab.plots.style import amount
from minizero.scale.shapes import Shape

SHAPE = Shape(layers=34, hidden=4096, heads=32, vocab=32_000)
"""7 billion parameters."""
RANKS, CAPACITY = 8, 80e9


@cache
def steps() -> dict[str, Any]:
    """The simulated step of the four plans, packed."""
    pack = Pack(TICK)
    traces = []
    for stage in range(4):
        at = Setting(stage, overlap=True, prefetch=stage == 3, checkpointing=True)
        traces.append(pack.add(simulated(at, SHAPE, RANKS)))
    return {"tables": pack.tables(), "traces": traces}


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
        """Of each plan: its bytes at the moment and at most, and its step in ms."""
        every = [
            unpacked_moments(self.steps["tables"], one) for one in self.steps["traces"]
        ]
        now, found = self.moment * max(total for _, total in every), []
        for name, (lines, total) in zip(PLANS, every, strict=True):
            held = then = most = 0
            for _, time, changes in lines:
                held += sum(n for place, _, _, n in changes if place == "device")
                most = max(most, held)
                then = held if time <= now else then
            tick = self.steps["tables"]["tick"]
            found.append([name, then, most, round(1e3 * total * tick)])
        return found

    def describe(self) -> str:
        most = ", ".join(f"{name} {amount(n)}" for name, _, n, _ in self.numbers())
        return f"Live bytes on each of {RANKS} GPUs in a step, at most: {most}."

    def fallback(self) -> str:
        rows = {name: f"{amount(n)}, {ms} ms" for name, _, n, ms in self.numbers()}
        return table("A step of a 7-billion model", ("plan", "at most"), rows)
