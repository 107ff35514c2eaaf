"""Which line of the package carries out an operation that a trace shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import minizero
from minizero import comm
from minizero.memory.trace import Trace
from minizero.offload import Offload
from minizero.offload.swap_file import SwapFile
from minizero.zero import DataParallel, ZeRO1
from minizero.zero.stage3 import ShardedFlat

PACKAGE = Path(minizero.__file__).resolve().parent
Function = Callable[..., Any]

# operation, or operation and phase: a function, and how the line begins
LINES: dict[str, tuple[Function, str]] = {
    "forward": (DataParallel.__call__, "return self.model("),
    "backward": (DataParallel.backward, "loss = self.precision.scale_loss(loss)"),
    "update": (DataParallel.step, "self._update("),
    "launch": (comm.Work.__init__, "self._finish"),
    "wait": (comm.Work.wait, "finish()"),
    "release": (ShardedFlat.free, "self.full.untyped_storage().resize_(0)"),
    "load": (Offload.load, "self.up.copy("),
    "add": (Offload.accumulate, "self.down.copy("),
    "in": (Offload._stage, "self._inward.copy(flat.staged_grad"),
    "out": (Offload._unstage, "self._outward.copy("),
    "read": (SwapFile.read, "return"),
    "write": (SwapFile.write, "return"),
    "gradient norm": (DataParallel.grad_norm, "each = ["),
    "all_gather": (comm.all_gather, "work = Work("),
    "all_gather forward": (ShardedFlat._launch, "work = comm.all_gather("),
    "all_gather backward": (ShardedFlat._launch, "work = comm.all_gather("),
    "all_gather step": (ZeRO1.publish, "work = comm.all_gather("),
    "all_reduce": (comm.all_reduce, "return all_reduce_whole("),
    "all_reduce backward": (DataParallel.reduce, "work = comm.all_reduce("),
    "reduce_scatter": (comm.reduce_scatter, "start = partial(begin"),
    "reduce_scatter backward": (ZeRO1.reduce, "work = comm.reduce_scatter("),
    "broadcast": (comm.broadcast, "return exchange("),
    "barrier": (comm.barrier, "all_gather("),
}


@cache
def line(function: Function, start: str) -> str:
    """The line of a function that begins so, else its first, as `path#name#line`."""
    lines = [text.strip() for text in inspect.getsource(function).splitlines()]
    found = next((text for text in lines if text.startswith(start)), lines[0])
    path = Path(inspect.getfile(function)).resolve().relative_to(PACKAGE.parent)
    return f"{path.as_posix()}#{function.__qualname__}#{found}"


def source(operation: str, unit: str = "", phase: str = "") -> str:
    """The line that carries out an operation; a stage's own, if it has one."""
    names = unit, f"{operation} {phase}", operation
    return line(*next(LINES[name] for name in names if name in LINES))


def with_sources(trace: Trace) -> Trace:
    """The trace of a run, with the line of each slice."""
    slices = [s._replace(source=source(s.verb, s.unit, s.phase)) for s in trace.slices]
    return Trace(trace.ranks, slices, trace.moments)
