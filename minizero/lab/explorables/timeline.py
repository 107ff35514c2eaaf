"""The timeline: what each rank does in a step, and which bytes are live meanwhile."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import traitlets

from minizero.lab.explorables.base import (
    STRIPES,
    Amount,
    Computed,
    Explorable,
    look,
    module,
)
from minizero.lab.explorables.memory import gpt_shape
from minizero.lab.explorables.packing import Pack, unpacked
from minizero.lab.explorables.sources import LINES, line
from minizero.lab.explorables.steps import OFFLOADS, TICK, Setting, settings, simulated
from minizero.lab.plots.style import CATEGORY_COLOURS, DOING_COLOURS, GREY, amount
from minizero.memory.trace import Trace

RECORDED = Path(__file__).with_name("recorded.json")
"""A step of two ranks, which `minizero.trace` has recorded."""
COLOURS = {
    "forward": DOING_COLOURS["forward"],
    "backward": DOING_COLOURS["backward"],
    "update": DOING_COLOURS["update"],
    "launch": GREY,
    "wait": "transparent",
    "gather": CATEGORY_COLOURS["parameters"],
    "reduce": CATEGORY_COLOURS["gradients"],
    "in": "#D4D4D4",
    "out": "#D4D4D4",
}
"""Grey for computing, and for a call the hue of what it carries; what is copied or read
towards the device is pale, and what leaves it pale with stripes."""
VERBS = {
    name: look(colour, STRIPES if name in ("wait", "out") else None)
    for name, colour in COLOURS.items()
}
CATEGORIES = {name: look(colour) for name, colour in CATEGORY_COLOURS.items()}
SHOWN = (
    *("lanes", "curve", "boxes", "stage", "overlap", "prefetch", "offload"),
    *("checkpointing", "micro_batches", "source", "rank", "zoom", "moment"),
)
PLANS = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3")


@cache
def all_steps() -> dict[str, Any]:
    """The simulated step of every setting, packed."""
    pack = Pack(TICK)
    packed = {at.key: pack.add(simulated(at)) for at in settings()}
    return {"tables": pack.tables(), "traces": packed}


def lines() -> dict[str, list[str]]:
    """The lines for a trace of the reader's own, which has none."""
    return {name: line(*where).split("#", 2) for name, where in LINES.items()}


def packed(trace: Trace) -> dict[str, Any]:
    """A recorded trace, packed: its times to the microsecond."""
    pack = Pack(1e-6)
    traces = {"recorded": pack.add(trace)}
    return {"tables": pack.tables(), "traces": traces}


class Timeline(Explorable):
    """A step of each rank: lanes of what it does, and its live bytes under them.

    stage: 0 to 3. overlap: collectives beside computation. prefetch: parameters are
        gathered a block ahead; for stage 3, with overlap. offload: "none", or optimizer
        state and, at stage 3, parameters on the "host" or the "disk". checkpointing: of
        each block. micro_batches: 1 or, without offload, 2, whose gradients add up.
    source: "simulated", or "recorded" with what `minizero.trace` gave.
    rank: whose bytes the curve shows. moment: share of the step that is over, 0 to 1.
    n_params: of the model whose blocks these are, 1e8 to 1e12. Simulated is one of 7
        billion; parameters and times are scaled by the square of the hidden size,
        activations by the hidden size.
    zoom: into how many parts the axis is cut, of which the one of the moment is shown.
    point: said of the moment, as long as the plan is the one it opens with.
    shown: what is there before the reader asks for everything: of "lanes", "curve",
        "boxes", and controls by their names. A category cuts the curve down to it.
    """

    kind = "timeline"
    _esm = module(kind)

    stage = traitlets.Enum([0, 1, 2, 3], 3).tag(sync=True)
    overlap = traitlets.Bool(True).tag(sync=True)
    prefetch = traitlets.Bool(True).tag(sync=True)
    offload = traitlets.Enum(list(OFFLOADS), "none").tag(sync=True)
    checkpointing = traitlets.Bool(False).tag(sync=True)
    micro_batches = traitlets.Enum([1, 2], 1).tag(sync=True)
    source = traitlets.Enum(["simulated", "recorded"], "simulated").tag(sync=True)
    rank = traitlets.Enum([0, 1, 2, 3], 0).tag(sync=True)
    zoom = traitlets.Enum([1, 2, 4, 8, 16], 1).tag(sync=True)
    point = traitlets.Unicode().tag(sync=True)
    shown = traitlets.List(list(SHOWN)).tag(sync=True)
    moment = Amount(0.155, 0, 1).tag(sync=True)
    n_params = Amount(7e9, 1e8, 1e12).tag(sync=True)
    steps = Computed(all_steps).tag(sync=True)
    recorded = Computed(lambda: json.loads(RECORDED.read_text())).tag(sync=True)
    verbs = traitlets.Dict(VERBS).tag(sync=True)
    sources = Computed(lines).tag(sync=True)
    categories = traitlets.Dict(CATEGORIES).tag(sync=True)

    def setting(self) -> Setting:
        """What is shown: what does nothing at a stage is off."""
        ahead = self.overlap and self.prefetch and self.stage == 3
        offload = self.offload if self.stage else "none"
        many = self.micro_batches if offload == "none" else 1
        how = self.stage, self.overlap, ahead, offload, self.checkpointing
        return Setting(*how, many)

    def numbers(self) -> list[list[Any]]:
        """Bytes of the rank at the moment, and at most, by category and by place."""
        key = "recorded" if self.source == "recorded" else self.setting().key
        packs = self.recorded if self.source == "recorded" else self.steps
        wide = gpt_shape(self.n_params)[0] / gpt_shape(7e9)[0]
        wide = 1 if self.source == "recorded" else wide
        trace, total = unpacked(packs["tables"], packs["traces"][key], wide)
        names = [*CATEGORY_COLOURS, "device", "host", "disk"]
        rows = [(-1.0, dict.fromkeys(names, 0))]
        # a simulated step has one rank, as which all others are
        rank = min(self.rank, max(moment.rank for moment in trace.moments))
        for time, live in trace.live(rank):
            rows.append((time, dict.fromkeys(names, 0)))
            for (place, category), nbytes in live.items():
                rows[-1][1][place] += nbytes
                if place == "device":
                    rows[-1][1][category] += nbytes
        then = [now for time, now in rows if time <= round(self.moment * total)][-1]
        return [[name, then[name], max(now[name] for _, now in rows)] for name in names]

    def describe(self) -> str:
        most = {name: number for name, _, number in self.numbers()}
        which = self.source if self.source == "recorded" else PLANS[self.stage]
        return f"A step, {which}: at most {amount(most['device'])} live on a device."
