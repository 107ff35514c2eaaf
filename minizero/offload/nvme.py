"""The update of shards on disk, slice by slice."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..memory import labels
from ..zero.elementwise import state_layout
from ..zero.flat_buffer import Unit
from ..zero.interfaces import Near, NearShard
from ..zero.owned import Owned
from .nvme_storage import DiskStorage
from .staging import StagedTensor


class Activity(NamedTuple):
    """A bar of a timeline: what a lane did for a unit, from when to when.

    `lane`: "read", "step" or "write". Seconds of `time.perf_counter`.
    """

    lane: str
    unit: str
    started: float
    finished: float


@dataclass(eq=False)
class StagedSlice:
    """Elements a to b of an owned shard, and all that their update needs.

    `values`: of the parameters. `master`: the same where no copy is kept.
    `states`: the optimizer's, with one value for each element; they are
    `fresh` if it has yet to make them. `others`: what it keeps beside them,
    such as a step counter, as before this update.
    """

    unit: Unit
    owned: Owned
    values: StagedTensor
    grad: StagedTensor
    master: StagedTensor
    states: dict[str, StagedTensor]
    others: dict[str, Any]
    fresh: bool

    @property
    def tensors(self) -> list[StagedTensor]:
        tensors = [self.values, self.grad, self.master]
        return list(dict.fromkeys([*tensors, *self.states.values()]))

    def bring(self, buffer: Tensor) -> None:
        """Launch all reads, into this staging buffer."""
        self.buffer, start = buffer, 0
        for tensor in self.tensors:
            tensor.bring(buffer[start : start + tensor.room])
            start += tensor.room

    def arrive(self) -> NearShard:
        """Wait for them, and show the optimizer this slice only."""
        for tensor in self.tensors:
            tensor.arrive()
        given, state = self.owned.given, self.owned.state
        given.data = self.master.here
        state.clear()
        state.update(copy.deepcopy(self.others))
        if not self.fresh:
            state.update({key: s.here for key, s in self.states.items()})
        self.began = time.perf_counter()
        near = self.grad.here, self.values.here
        return NearShard(self.owned.flat, given, *near)

    def leave(self) -> None:
        """Launch all writes; the optimizer is left with the stand-ins."""
        self.ended = time.perf_counter()
        given, state = self.owned.given, self.owned.state
        # a precision may have called a gradient in there else
        labels.label(self.buffer, "buffers")
        for key, staged in self.states.items():
            if state[key].data_ptr() != staged.here.data_ptr():
                staged.here.copy_(state[key])
            state[key] = staged.tensor
        given.data = given.data[:0]
        found = [tensor.leave() for tensor in self.tensors]
        self.writes = [write for write in found if write is not None]

    def timeline(self) -> Iterator[Activity]:
        """When it was read, updated and written; call it afterwards."""
        reads = [t.reading for t in self.tensors if t.reading is not None]
        name = self.unit.name
        for lane, transfers in (("read", reads), ("write", self.writes)):
            if transfers:
                began = min(t.started for t in transfers)
                ended = max(t.finished for t in transfers)
                yield Activity(lane, name, began, ended)
        yield Activity("step", name, self.began, self.ended)


class _FirstStates(TorchFunctionMode):
    """An optimizer makes its first states of a slice in the slice's room.

    They are zeros like the parameter; other states are copied afterwards.
    """

    def __init__(self, part: StagedSlice) -> None:
        super().__init__()
        self.given = part.owned.given
        self.rooms = [state.here for state in part.states.values()]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.zeros_like and args[0] is self.given and self.rooms:
            return self.rooms.pop(0).zero_()
        return func(*args, **(kwargs or {}))


def slices(
    home: DiskStorage,
    unit: Unit,
    owned: Owned,
    optimizer: torch.optim.Optimizer,
) -> Iterator[StagedSlice]:
    """Cut the update of a shard into what fits a staging buffer."""
    found = owned.state.items()
    states = {k: v for k, v in found if getattr(v, "ndim", 0) == 1}
    others = {k: v for k, v in found if k not in states}
    fresh = not states
    if fresh:
        assert owned.flat.group is not None
        group = optimizer.param_groups[owned.flat.group]
        layout = state_layout(optimizer, group, owned.given)
        states = {k: home.new_state(owned.flat, d) for k, d in layout.items()}
    apart, dtype = owned.master is not owned.shard, owned.given.dtype
    for a in range(0, owned.flat.size, home.buffer_size):
        b = min(a + home.buffer_size, owned.flat.size)
        stage = partial(home.stage, owned.flat, a, b)
        # where masters are apart, they are rounded into the parameters
        values = stage("parameters", owned.shard, read=not apart)
        yield StagedSlice(
            unit,
            owned,
            values,
            stage("gradients", owned.grad, dtype=dtype, written=False),
            stage("optimizer", owned.master) if apart else values,
            {
                key: stage("optimizer", state, read=not fresh)
                for key, state in states.items()
            },
            others,
            fresh,
        )


class NVMe(DiskStorage):
    """Keeps on disk what the plan places on "nvme", the rest as `Offload`.

    Host memory holds `buffer_count` staging buffers, each with room for all
    that the update of `buffer_size` elements needs, so it does not grow with
    the model. While slice i is updated, i + 1 is read and i - 1 written
    (Rajbhandari et al. 2021, sec. 5.2.2, 6.3). Before an all-gather a shard
    is read through the same buffers, and what came next the last time is
    read ahead.

    `folder`: of the swap file (default: the environment's MINIZERO_NVME, or
    the folder for temporary files). `block_size`, `queue_depth`: bytes of a
    request, requests in flight. `timeline`: what the last update did, when.

    A disk that is full or fails raises DiskFault, which names the folder.
    The home refuses to work from then on: an update may be half done.
    """

    timeline: list[Activity] = []

    def staged(
        self,
        units: list[tuple[Unit, list[Owned]]],
        optimizer: torch.optim.Optimizer,
    ) -> Generator[Near, None, None]:
        """Update slice by slice: read(i+1), step(i), write(i-1)."""
        with self.guard():
            self.ahead.cancel(restart=True)
            todo = [
                part
                for unit, shards in units
                for owned in shards
                for part in slices(self, unit, owned, optimizer)
            ]
            rooms = (sum(t.room for t in part.tensors) for part in todo)
            self.buffers.reserve(max(rooms, default=0))
            # one buffer is for what is being written
            launched, ahead = 0, max(1, self.buffers.count - 1)
            for i, here in enumerate(todo):
                for later in todo[launched : i + ahead]:
                    later.bring(self.buffers.take())
                launched = max(launched, i + ahead)
                near = here.arrive()
                with _FirstStates(here) if here.fresh else nullcontext():
                    yield Near([near], partial(self._leave, todo, i))
            self.buffers.drain()
            self.timeline = [bar for part in todo for bar in part.timeline()]

    def _leave(self, todo: list[StagedSlice], i: int) -> list[Unit]:
        """Launch write(i); the units that can be published."""
        with self.guard():
            here = todo[i]
            here.leave()
            self.buffers.give(here.buffer, here.writes)
            following = todo[i + 1].unit if i + 1 < len(todo) else None
            if self.plan.parameters.on != "nvme":
                return [] if following is here.unit else [here.unit]
            if following is not None:
                return []
            # who keeps units whole reads them again, through the buffers
            self.buffers.drain()
            return list(dict.fromkeys(s.unit for s in todo))
