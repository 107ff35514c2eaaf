"""Who calls whom in one step: recorded from a real one, drawn from the top down.

A stage of ZeRO is the stage before with some methods overridden. The figure reads from
the classes which these are, and draws a call of one of them in colour.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import nn

from minizero import Plan, comm, parallelize
from minizero.lab.plots.style import GREY, LINES, STYLE
from minizero.zero import Action, DataParallel, Flat

LANES = ("you", "hook", "net", "asked", "operation", "comm")
"""What a call is: yours, torch's by a hook, the net's own, a question to a schedule, a
storage or a precision, an operation of a unit, a collective."""

NAMES = {
    name: lane
    for lane, names in {
        "you": "__call__ backward step",
        "hook": "_before_forward _after_forward _before_backward _after_backward "
        "_on_grad",
        "net": "collect _arrived _reduce",
        "operation": "gather release reduce reduced publish clear_grads",
        "comm": "all_gather all_reduce reduce_scatter",
    }.items()
    for name in names.split()
}
"""The methods and functions that are shown, and the lane of each."""

SHOWN = {"__call__": "net(x)", "backward": "backward(loss)", "step": "step()"}

LANE, TEXT = 0.2, 2.1
"""Inches, so that a figure is no wider than the page of a phone: a lane, the names."""

LINE: Any = {"color": GREY, "linewidth": 0.8, "zorder": 1}


@dataclass
class StepCall:
    """A call, and the calls that it made.

    `answer`: the operations of the actions that a schedule answered with.
    """

    name: str
    lane: str
    answer: str = ""
    calls: list[StepCall] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, StepCall]]:
        """This call and all under it, with their depths, in order."""
        yield depth, self
        for call in self.calls:
            yield from call.walk(depth + 1)


def changed(kind: type[DataParallel]) -> set[str]:
    """The methods, new ones too, in which a stage differs from the one before it."""
    if kind is DataParallel:
        return set()
    return {name for name, value in vars(kind).items() if inspect.isfunction(value)}


def small_step(stage: int, *seams: str) -> tuple[DataParallel, list[StepCall]]:
    """One step of a matrix on this process: the net, which has one unit, and its calls.

    seams: which of "schedule", "storage" and "precision" to show, too.
    """
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    net = parallelize(
        model,
        torch.optim.AdamW(model.parameters()),
        Plan.stage(stage),
        units=lambda module: False,  # the model is one unit, the root
    )
    top = StepCall("", "")
    running: list[tuple[FrameType | None, StepCall]] = [(None, top)]

    def see(frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            name, lane = frame.f_code.co_name, _lane(frame, net, seams)
            above = running[-1][1]
            resumed = frame.f_code.co_flags & inspect.CO_GENERATOR
            # a method that calls the one it overrides is shown once
            if lane and above.name != name and not resumed:
                call = StepCall(name, lane)
                above.calls.append(call)
                running.append((frame, call))
        elif event == "return" and frame is running[-1][0]:
            _, call = running.pop()
            if call.lane == "hook" and not call.calls:  # of a call inside the unit's
                running[-1][1].calls.pop()
            if isinstance(value, list) and value and isinstance(value[0], Action):
                call.answer = ", ".join(action.operation for action in value)

    sys.setprofile(see)
    try:
        # a GPU's backward would run in a thread of its own, unseen
        with torch.autograd.set_multithreading_enabled(False):
            net.backward(net(torch.ones(2, 4, requires_grad=True)).sum())
        net.step()
    finally:
        sys.setprofile(None)
    return net, top.calls


def _lane(frame: FrameType, net: DataParallel, seams: tuple[str, ...]) -> str:
    """The lane of a call; "" if it is not shown."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if any(owner is getattr(net, seam) for seam in seams):
        return "" if name.startswith("_") else "asked"
    if frame.f_globals["__name__"] == comm.all_reduce.__module__:
        ours = owner is None
    else:
        ours = owner is net or isinstance(owner, Flat)
    return NAMES.get(name, "") if ours else ""


@rc_context(STYLE)
def step_calls(stage: int, *seams: str) -> Figure:
    """The calls of one step for one unit under a stage, 0 to 3, from the top down.

    A dot is a call, and a line leads to it from its caller. In colour: what the stage
    before does otherwise, or not at all.

    seams: which of "schedule", "storage" and "precision" to show, too.
    """
    net, calls = small_step(stage, *seams)
    new = changed(type(net))
    rows = [row for call in calls for row in call.walk()]
    lanes = [lane for lane in LANES if any(call.lane == lane for _, call in rows)]
    names, right = LANE * len(lanes), LANE * len(lanes) + TEXT
    figure = Figure(figsize=(right + LANE / 2, 0.19 * (len(rows) + 3)))
    axes = figure.add_subplot()
    above: list[tuple[float, int, bool]] = []  # of each depth: lane, row, in colour
    for y, (depth, call) in enumerate(rows):
        x, parent_new = LANE * lanes.index(call.lane), False
        if depth:
            from_x, from_y, parent_new = above[depth - 1]
            axes.plot([from_x, from_x, x], [from_y, y, y], **LINE)
        colour = call.name in new or (call.lane == "comm" and parent_new)
        above[depth:] = [(x, y, colour)]
        if colour:
            band = (-LANE / 2, y - 0.5), right + LANE / 2, 1
            axes.add_patch(Rectangle(*band, color=LINES[1], alpha=0.13, linewidth=0))
        axes.plot(x, y, "s" if colour else "o", color=LINES[1] if colour else GREY)
        text = SHOWN.get(call.name, call.name)
        text += f": {call.answer}" * bool(call.answer)
        weight = "bold" if colour or not depth else "normal"
        axes.text(names, y, text, va="center", fontsize=9, fontweight=weight)
    for i, lane in enumerate(lanes):
        title = seams[0] if lane == "asked" and len(seams) == 1 else lane
        axes.text(LANE * (i - 0.2), -0.8, title, fontsize=8, rotation=45)
    axes.set(xlim=(-LANE / 2, right), ylim=(len(rows) - 0.4, -3))
    axes.axis("off")
    return figure
