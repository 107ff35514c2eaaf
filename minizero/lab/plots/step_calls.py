"""Who calls whom in one step: recorded from a real one, drawn from the top down.

A stage of ZeRO is the stage before with some methods overridden. Which these are is
read from the classes, and a call of one of them is drawn in colour.
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
from minizero.lab.plots.base import STYLE
from minizero.lab.plots.style import GREY, LINES
from minizero.zero.data_parallel import DataParallel
from minizero.zero.flat_buffer import Flat, Unit
from minizero.zero.interfaces import Move

LANES = ("you", "hook", "net", "asked", "verb", "comm")
"""What a call is: yours, torch's by a hook, the net's own, a question to a schedule, a
home or a precision, a verb of the plan, a collective."""

NAMES = {
    "__call__": "you",
    "backward": "you",
    "step": "you",
    "_before_forward": "hook",
    "_after_forward": "hook",
    "_before_backward": "hook",
    "_on_grad": "hook",
    "_after_backward": "hook",
    "collect": "net",
    "_arrived": "net",
    "_reduce": "net",
    "_update": "net",
    "gather": "verb",
    "release": "verb",
    "reduce": "verb",
    "reduced": "verb",
    "publish": "verb",
    "clear_grads": "verb",
    "all_gather": "comm",
    "all_reduce": "comm",
    "reduce_scatter": "comm",
}
"""What is shown, and in which lane; what lies between is passed over."""

SAID = {"__call__": "net(x)", "backward": "backward(loss)", "step": "step()"}

LANE, TEXT = 0.2, 2.1
"""Inches, so that a figure is no wider than the page of a phone: a lane, the names."""

LINE: Any = {"color": GREY, "linewidth": 0.8, "zorder": 1}


@dataclass
class StepCall:
    """A call, how often it came in a row, and the calls that it made.

    `by`: the class that defines the method, or the module of a function. `answer`: the
    verbs of the moves that a schedule answered with.
    """

    name: str
    lane: str
    by: str
    answer: str = ""
    times: int = 1
    calls: list[StepCall] = field(default_factory=list)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, StepCall]]:
        """This call and all under it, with their depths, in order."""
        yield depth, self
        for call in self.calls:
            yield from call.walk(depth + 1)


def before(kind: type[DataParallel]) -> type[DataParallel]:
    """The stage before: the next class up that sets another plan; of plan 0 itself."""
    for k in kind.__mro__:
        if issubclass(k, DataParallel) and k.plan != kind.plan and "plan" in vars(k):
            return k
    return DataParallel


def changed(kind: type[DataParallel]) -> dict[str, str]:
    """The methods, new ones too, in which a stage differs from the one before it.

    With each the class that defines it.
    """
    old = before(kind)
    return {
        name: k.__name__
        for k in reversed(kind.__mro__[: kind.__mro__.index(old)])
        for name, value in vars(k).items()
        if inspect.isfunction(value) and value is not getattr(old, name, None)
    }


def small_step(stage: int, *seams: str) -> tuple[DataParallel, list[StepCall]]:
    """One step of two linear layers on this process: the net, and its calls."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net = parallelize(
        model,
        torch.optim.AdamW(model.parameters()),
        Plan.stage(stage),
        units=lambda module: isinstance(module, nn.Linear),
    )
    return net, record(net, net.units[-1], torch.ones(2, 4), *seams)


def record(
    net: DataParallel, unit: Unit, x: torch.Tensor, *seams: str
) -> list[StepCall]:
    """The calls that one step makes for this unit, and for no unit in particular.

    The loss is the sum of the output. On a GPU backward has threads of its own, whose
    calls are not seen: use a net on the CPU.

    seams: which of "schedule", "home" and "precision" to show, too.
    """
    top = StepCall("", "", "")
    seen: list[tuple[FrameType, StepCall]] = []

    def see(frame: FrameType, event: str, value: Any) -> None:
        if event == "return" and isinstance(value, list) and value:
            if isinstance(value[0], Move):
                for f, call in seen:
                    if f is frame:
                        call.answer = ", ".join(move.verb for move in value)
        found = _lane(frame, net, seams) if event == "call" else None
        if found is None or any(f is frame for f, _ in seen):  # a generator goes on
            return
        stack = list(_stack(frame))
        if any(u is not unit for f in stack for u in _units(net, f)):
            return
        calls = (call for above in stack[1:] for f, call in seen if f is above)
        parent, (name, lane) = next(calls, top), found
        if parent.name != name:  # not a method that asks the class above
            call = StepCall(name, lane, _definer(frame))
            parent.calls.append(call)
            seen.append((frame, call))

    sys.setprofile(see)
    try:
        net.backward(net(x).sum())
        net.step()
    finally:
        sys.setprofile(None)
    return _merged(top.calls)


def _lane(
    frame: FrameType, net: DataParallel, seams: tuple[str, ...]
) -> tuple[str, str] | None:
    """The name of a call and its lane, if it is to be shown."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    for seam in seams:
        if owner is getattr(net, seam) and not name.startswith("_"):
            return f"{seam}.{name}", "asked"
    if frame.f_globals["__name__"] == comm.all_reduce.__module__:
        ours = owner is None
    else:
        ours = owner is net or isinstance(owner, Flat)
    return (name, NAMES[name]) if ours and name in NAMES else None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and those above it, as far as they are the package's."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("minizero."):
            yield frame
        frame = frame.f_back


def _units(net: DataParallel, frame: FrameType) -> Iterator[Unit]:
    """The units that the arguments of a call stand for."""
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount]:
        value = frame.f_locals.get(name)
        for unit in net.units:
            if (
                value is unit
                or getattr(value, "unit", None) is unit
                or any(value is module for module in unit.modules)
                or any(value is f or value in f.slots for f in unit.flats)
                or any(value is s.parameter for f in unit.flats for s in f.slots)
            ):
                yield unit


def _definer(frame: FrameType) -> str:
    """The class whose method this frame runs, or the module of its function."""
    name = frame.f_code.co_name
    for k in type(frame.f_locals.get("self")).__mro__:
        if getattr(vars(k).get(name), "__code__", None) is frame.f_code:
            return k.__name__
    return str(frame.f_globals["__name__"])


def _merged(calls: list[StepCall]) -> list[StepCall]:
    """Calls of one name that follow each other become one, with all that they call."""
    merged: list[StepCall] = []
    for call in calls:
        if merged and merged[-1].name == call.name:
            _join(merged[-1], call)
        else:
            merged.append(call)
    for call in merged:
        call.calls = _merged(call.calls)
    return merged


def _join(one: StepCall, other: StepCall) -> None:
    one.times += other.times
    known = {call.name: call for call in one.calls}
    for call in other.calls:
        if call.name in known:
            _join(known[call.name], call)
        else:
            one.calls.append(call)


@rc_context(STYLE)
def step_calls(stage: int, *seams: str) -> Figure:
    """The calls of one step for one unit under a stage, 0 to 3, from the top down.

    A dot is a call, and a line leads to it from its caller. In colour, with the class
    that defines it: what the stage before does otherwise, or not at all.

    seams: which of "schedule", "home" and "precision" to show, too.
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
            if call.lane != "comm":
                end = right - 0.04, y
                axes.text(*end, call.by, ha="right", va="center", fontsize=8)
        axes.plot(x, y, "s" if colour else "o", color=LINES[1] if colour else GREY)
        weight = "bold" if colour or not depth else "normal"
        text = _said(call, seams)
        axes.text(names, y, text, va="center", fontsize=9, fontweight=weight)
    for i, lane in enumerate(lanes):
        said = seams[0] if lane == "asked" and len(seams) == 1 else lane
        axes.text(LANE * (i - 0.2), -0.8, said, fontsize=8, rotation=45)
    axes.set(xlim=(-LANE / 2, right), ylim=(len(rows) - 0.4, -3))
    axes.axis("off")
    return figure


def _said(call: StepCall, seams: tuple[str, ...]) -> str:
    """What stands beside a call; with one seam its lane says whose question it is."""
    text = SAID.get(call.name, call.name)
    if len(seams) == 1:
        text = text.removeprefix(f"{seams[0]}.")
    if call.answer:
        text += f": {call.answer}"
    return text if call.times == 1 else f"{text} ×{call.times}"
