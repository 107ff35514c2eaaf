"""Which line of the package does what a trace shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from .. import comm
from ..comm import Work
from ..offload.copy_streams import ArrivingGradients
from ..offload.host import HostStorage, UnitCopies
from ..offload.swap_file import SwappedShard
from ..zero.backward import Backward
from ..zero.data_parallel import DataParallel
from ..zero.interfaces import Home
from ..zero.sharded_buffer import ShardedFlat
from ..zero.update import Clipping

PACKAGE = Path(__file__).resolve().parent.parent
Function = Callable[..., Any]

# what a slice's verb is called, beside the function and how the line begins
_LINES: dict[str, tuple[Function, str]] = {
    "forward": (DataParallel.__call__, "return self.model("),
    "backward": (Backward.backward, "scaled.backward("),
    "update": (Home.update, "optimizer.step()"),
    "launch": (Work.__init__, "self._finish"),
    "wait": (Work.wait, "finish()"),
    "release": (ShardedFlat.free, "self.full.untyped_storage().resize_(0)"),
    "load": (HostStorage.load, "self.up.copy("),
    "add": (ArrivingGradients.add, "self.stream.copy("),
    "in": (UnitCopies.bring, "self._inward.copy(grad"),
    "out": (UnitCopies.send, "self._outward.copy("),
    "read": (SwappedShard.read, "return self._swap.read("),
    "write": (SwappedShard.write, "return self._swap.write("),
    "gradient norm": (Clipping._shard_norms, "return self.of_all("),
    "all_gather": (comm.all_gather, "return _begin("),
    "all_reduce": (comm.all_reduce, "return _begin("),
    "reduce_scatter": (comm.reduce_scatter, "return _begin("),
    "broadcast": (comm.broadcast, "return _begin("),
    "barrier": (comm.barrier, "_begin("),
}


@cache
def line(function: Function, start: str) -> str:
    """The line of a function that begins so, else its first, as `path#name#line`."""
    lines = [text.strip() for text in inspect.getsource(function).splitlines()]
    found = next((text for text in lines if text.startswith(start)), lines[0])
    path = Path(inspect.getfile(function)).resolve().relative_to(PACKAGE.parent)
    return f"{path.as_posix()}#{function.__qualname__}#{found}"


def source(kind: type[DataParallel], verb: str, unit: str = "", phase: str = "") -> str:
    """The line that does `verb`, where a net of this kind, a stage, has its own."""
    if unit in _LINES:
        verb = unit
    elif verb in ("all_reduce", "reduce_scatter") and phase == "backward":
        return line(kind.reduce, f"yield comm.{verb}(")
    elif verb == "all_gather" and phase in ("forward", "backward"):
        return line(ShardedFlat.gather, "work = comm.all_gather(")
    elif verb == "all_gather" and phase == "step":
        return line(kind.publish, "yield")
    return line(*_LINES[verb])
