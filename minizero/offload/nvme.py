"""State on disk, and its update slice by slice through a few host buffers."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory import labels
from ..memory.bytes import aligned, host_empty
from ..memory.plan import Bytes, Plan
from ..zero.elementwise import state_layout
from ..zero.flat import Flat, Unit
from ..zero.seams import Precision
from .host import CopyEvent, Offload, empty, placeholder
from .swap_file import ALIGN, SwapFile, SwappedTensor, Transfer, aligned_buffer

Use = Transfer | CopyEvent


class StagingBuffers:
    """`count` buffers in host memory, of one size; there are never more.

    `size`: bytes of one. `nbytes`: of all. `free`: the unused ones.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"buffer_count must be at least 1, not {count!r}")
        self.count, self.size = count, 0
        self.free: list[Tensor] = []
        # buffers that were given back, and what still uses them
        self._busy: deque[tuple[Tensor, Sequence[Use]]] = deque()

    @property
    def nbytes(self) -> int:
        # each is cut from an allocation that is a page longer
        return self.count * (self.size + ALIGN) if self.size else 0

    def reserve(self, size: int) -> None:
        """Have buffers of `size` bytes; all must have been given back."""
        size = aligned(max(size, 1), ALIGN)
        if size > self.size:
            self.drain()
            self.free.clear()  # first: old and new buffers never coexist
            self.size = size
            self.free = [aligned_buffer(size) for _ in range(self.count)]

    def take(self) -> Tensor:
        """A buffer; if none is free, wait for the oldest that was given back."""
        if not self.free:
            self._wait_oldest()
        return self.free.pop()

    def give(self, buffer: Tensor, uses: Sequence[Use] = ()) -> None:
        """Give a buffer back; it is free when these transfers or copies are over."""
        if uses:
            self._busy.append((buffer, uses))
        else:
            self.free.append(buffer)

    def reclaim(self) -> None:
        """Free the oldest buffers whose uses are over, without waiting."""
        while self._busy and all(use.is_over() for use in self._busy[0][1]):
            self._wait_oldest()

    def drain(self) -> None:
        """Wait for every use."""
        while self._busy:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        buffer, uses = self._busy.popleft()
        for use in uses:
            use.wait()
        self.free.append(buffer)


class Activity(NamedTuple):
    """A bar of a timeline: what a lane did for a unit, from when to when.

    `lane`: "read", "step" or "write". Seconds of `time.perf_counter`.
    """

    lane: str
    unit: str
    started: float
    finished: float


@dataclass(eq=False)
class StagedTensor:
    """Elements a to b of a stored tensor, while they are updated.

    `here`: a copy of them on `device`, where the optimizer works, in `dtype`;
    or they themselves, if they are stored there. `read`, `written`: whether
    the update needs their old values, and changes them. `swapped`: their
    place if they are on disk; a and b are then the borders of a record.
    """

    tensor: Tensor
    swapped: SwappedTensor | None
    a: int
    b: int
    dtype: torch.dtype
    device: torch.device
    read: bool = True
    written: bool = True
    reading: Transfer | None = None

    @property
    def room(self) -> int:
        """Bytes that it needs of a staging buffer."""
        in_place = self.tensor.device == self.device and self.tensor.dtype == self.dtype
        if self.swapped is None and (in_place or self.device.type != "cpu"):
            return 0
        return aligned((self.b - self.a) * self.dtype.itemsize, ALIGN)

    def launch_read(self, section: Tensor) -> None:
        """Launch what brings the elements to the host, to `room` bytes of a buffer."""
        self.section = section
        self.near = stored = self.tensor[self.a : self.b]
        if self.room:
            self.near = section.view(self.dtype)[: self.b - self.a]
        if self.swapped is not None and self.read:
            record = self.a // self.swapped.step
            self.reading = self.swapped.read(record, section)
        elif self.room and self.read:
            self.near.copy_(stored)

    def arrive(self) -> None:
        """Wait until the elements are `here`."""
        if self.reading is not None:
            self.reading.wait()
        self.here = self.near
        if self.near.device != self.device:
            copied = self.near.to(self.device)
            self.here = labels.label(copied, "buffers", on="device")

    def launch_write(self) -> list[Transfer]:
        """Send the elements back to where they are stored; the disk's transfers."""
        here, self.here = self.here, self.near
        if not self.written:
            return []
        if here is not self.near:
            self.near.copy_(here)
        if self.swapped is not None:
            return [self.swapped.write(self.a // self.swapped.step, self.section)]
        if self.room:
            self.tensor[self.a : self.b].copy_(self.near)
        return []


@dataclass(eq=False)
class Slice:
    """Some elements of a flat's shard, and all that their update needs.

    `values`: of the parameters. `master`: the same object where no copy is
    kept. `states`: the optimizer's with one value for each element; they are
    `fresh` if it has yet to make them. `others`: what else it keeps, such as
    a step counter, as it was before this update.
    """

    unit: Unit
    flat: Flat
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

    def launch_reads(self, buffer: Tensor) -> None:
        """Launch all reads, into this staging buffer."""
        self.buffer, start = buffer, 0
        for tensor in self.tensors:
            tensor.launch_read(buffer[start : start + tensor.room])
            start += tensor.room

    def show(self, state: dict[str, Any]) -> None:
        """Wait for the reads; let the optimizer have this slice only."""
        for tensor in self.tensors:
            tensor.arrive()
        self.flat.master.data = self.master.here
        self.flat.staged_grad = self.grad.here
        self.flat.staged_shard = self.values.here
        state.clear()
        state.update(copy.deepcopy(self.others))
        if not self.fresh:
            state.update({key: s.here for key, s in self.states.items()})
        self.began = time.perf_counter()

    def launch_writes(self, state: dict[str, Any], blank: Tensor) -> None:
        """Launch all writes; the optimizer is left with placeholders."""
        self.ended = time.perf_counter()
        labels.label(self.buffer, "buffers")  # a precision may have labelled a part
        for key, staged in self.states.items():
            if state[key].data_ptr() != staged.here.data_ptr():
                staged.here.copy_(state[key])
            state[key] = staged.tensor
        self.flat.master.data = blank
        del self.flat.staged_shard
        self.writes = [w for tensor in self.tensors for w in tensor.launch_write()]

    def activities(self) -> Iterator[Activity]:
        """When it was read, updated and written; call it when that is over."""
        reads = [t.reading for t in self.tensors if t.reading is not None]
        for lane, transfers in (("read", reads), ("write", self.writes)):
            if transfers:
                began = min(t.started for t in transfers)
                ended = max(t.finished for t in transfers)
                yield Activity(lane, self.unit.name, began, ended)
        yield Activity("step", self.unit.name, self.began, self.ended)


# The optimizer's vector instructions round the elements of an incomplete
# vector in another way.
VECTOR = 64


class NVMe(Offload):
    """Keeps on disk what the plan places on "nvme", the rest as `Offload`.

    A placeholder stands for each tensor on disk. Host memory holds
    `buffer_count` staging buffers, each with room for all that the update of
    `buffer_size` elements needs, so it does not grow with the model
    (Rajbhandari et al. 2021, sec. 5.2.2, 6.3).

    `folder`: of the swap file (default: the environment's MINIZERO_NVME, or
    the folder for temporary files). `block_size`, `queue_depth`: bytes of a
    request, requests in flight. `timeline`: what the last update did, when.

    A disk that is full or fails raises DiskFault, which names the folder.
    Later calls are refused then: some slices may be updated and some not.
    """

    places: tuple[str, ...] = ("device", "cpu", "nvme")

    def __init__(
        self,
        plan: Plan,
        folder: str | os.PathLike[str] | None = None,
        *,
        buffer_count: int = 4,
        buffer_size: int = 1 << 22,
        block_size: int = 1 << 20,
        queue_depth: int = 8,
    ) -> None:
        super().__init__(plan)
        if buffer_size < VECTOR or buffer_size % VECTOR:
            raise ValueError(
                f"buffer_size must be a multiple of {VECTOR} elements, not "
                f"{buffer_size!r}"
            )
        self.buffer_size = buffer_size
        self.buffers = StagingBuffers(buffer_count)
        chosen = folder or os.environ.get("MINIZERO_NVME") or tempfile.gettempdir()
        self.swap = SwapFile(Path(chosen), block_size, queue_depth)
        self.timeline: list[Activity] = []
        # of a placeholder, the place on disk of what it stands for
        self._swapped: WeakIdKeyDictionary = WeakIdKeyDictionary()
        # records that are read ahead of their use
        self._ahead: dict[tuple[SwappedTensor, int], tuple[Tensor, Transfer]] = {}
        self._fault: BaseException | None = None

    # ---- continued: placeholders, and what goes wrong

    @contextmanager
    def guard(self) -> Iterator[None]:
        """After an error inside, every later use is refused."""
        if self._fault is not None:
            raise RuntimeError(
                f"the state on disk is lost since this: {self._fault!r}; start again"
            ) from self._fault
        try:
            yield
        except BaseException as fault:
            self.close(fault)
            raise

    def close(self, why: BaseException | None = None) -> None:
        """Wait for what is under way, and give the disk's space back."""
        if self._fault is None:
            self._fault = why or RuntimeError("close() was called")
            self.swap.close()

    @property
    def on_disk(self) -> Bytes:
        """Bytes of the tensors on disk, without what fills pages up."""
        found = Bytes()
        for swapped in self._swapped.values():
            had = getattr(found, swapped.category)
            setattr(found, swapped.category, had + swapped.payload)
        return found

    def _allocate(self, like: Tensor, category: str) -> Tensor:
        """A placeholder for a new, uninitialized tensor on disk."""
        with self.guard():
            swapped = SwappedTensor(
                self.swap, category, like.numel(), like.dtype, self.buffer_size
            )
        made = placeholder(like, "cpu")
        self._swapped[made] = swapped
        weakref.finalize(made, swapped.free).atexit = False
        return made

    def store(self, values: Tensor, category: str) -> Tensor:
        if getattr(self.plan, category).on != "nvme":
            return super().store(values, category)
        if values.ndim == 0:  # a step counter
            return host_empty((), values.dtype, category).copy_(values)
        made = self._allocate(values, category)
        self.write_shard(made, values)
        return made

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """Always a placeholder: the optimizer gets one slice after another."""
        values = flat.shard if copy is None else self.store(copy, "optimizer")
        master = placeholder(values, self.at)
        self._stored[master] = values
        return master

    # ---- continued: reading and writing between updates

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        swapped = self._swapped.get(self._stored.get(shard, shard))
        if swapped is None:
            return super().write_shard(shard, values, a)
        with self.guard():
            for record, start, low, high in self._records(swapped, a, a + len(values)):
                buffer = self.buffers.take()
                elements = swapped.elements(record, buffer)
                if high - low < len(elements):
                    swapped.read(record, buffer).wait()
                elements[low - start : high - start] = values[low - a : high - a]
                self.buffers.give(buffer, [swapped.write(record, buffer)])
            self.buffers.drain()

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        swapped = self._swapped.get(self._stored.get(shard, shard))
        if swapped is None:
            return super().read_shard(shard, a, b)
        b = swapped.size if b is None else min(b, swapped.size)
        out = host_empty((b - a,), swapped.dtype, "buffers", passing=True)
        with self.guard():
            for record, start, low, high in self._records(swapped, a, b):
                buffer = self.buffers.take()
                swapped.read(record, buffer).wait()
                elements = swapped.elements(record, buffer)
                out[low - a : high - a] = elements[low - start : high - start]
                self.buffers.give(buffer)
        return out

    def _records(
        self, swapped: SwappedTensor, a: int, b: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Records that hold some of elements a to b: number, start, first, last."""
        self._cancel_reads()
        self.buffers.reserve(swapped.record_bytes)
        for record in range(a // swapped.step, -(-b // swapped.step)):
            start, stop = swapped.range(record)
            yield record, start, max(a, start), min(b, stop)

    def refresh(self, flat: Flat, precision: Precision) -> None:
        stored = self._stored[flat.master]
        if stored is not flat.shard:
            master, shard = self.read_shard(stored), self.read_shard(flat.shard)
            precision.shard_to_master(master, shard)
            self.write_shard(stored, master)

    # ---- continued: parameters, read ahead of their use

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        """Read the shard, and launch reads of the shards that are needed next."""
        swapped = self._swapped.get(shard)
        if swapped is None:
            return super().load(shard, into)
        with self.guard():
            if next(iter(self._ahead), None) != (swapped, 0):  # not as expected
                self._cancel_reads()
            for record in range(swapped.records):
                self._read_ahead(swapped, record)
                buffer, reading = self._ahead.pop((swapped, record))
                reading.wait()
                a, b = swapped.range(record)
                self.up.copy(into[a:b], swapped.elements(record, buffer))
                event = self.up.event()
                self.buffers.give(buffer, [] if event.is_over() else [event])
        return into

    def _read_ahead(self, swapped: SwappedTensor, record: int) -> None:
        """Launch the read of this record, and of later ones while buffers are free."""
        coming = [(swapped, later) for later in range(record, swapped.records)]
        for flat in (f for unit in self.schedule.upcoming() for f in unit.flats):
            following = self._swapped.get(flat.shard)
            if following is not None and not flat.is_unsharded:
                coming += [(following, r) for r in range(following.records)]
        self.buffers.reclaim()
        for place in coming:
            if place in self._ahead:
                continue
            if not self.buffers.free and place != (swapped, record):
                break
            buffer = self.buffers.take()
            self._ahead[place] = buffer, place[0].read(place[1], buffer)

    def _cancel_reads(self) -> None:
        """Give the buffers of reads back that are not needed."""
        for buffer, reading in self._ahead.values():
            reading.wait()
            self.buffers.give(buffer)
        self._ahead.clear()

    # ---- continued: the update, slice by slice

    def update(
        self,
        units: list[Unit],
        optimizer: torch.optim.Optimizer,
        precision: Precision,
    ) -> Iterator[list[Unit]]:
        """Read slice i + 1, update slice i and write slice i - 1: all at once."""
        with self.guard():
            self._cancel_reads()
            todo = [
                part
                for unit in units
                for flat in unit.trainable
                for part in self._slices(unit, flat, optimizer)
            ]
            rooms = (sum(t.room for t in part.tensors) for part in todo)
            self.buffers.reserve(max(rooms, default=0))
            # one buffer is for what is being written
            launched, ahead = 0, max(1, self.buffers.count - 1)
            for i, part in enumerate(todo):
                for later in todo[launched : i + ahead]:
                    later.launch_reads(self.buffers.take())
                launched = max(launched, i + ahead)
                state = optimizer.state[part.flat.master]
                part.show(state)
                self.step([part.flat], optimizer, precision)
                part.launch_writes(state, placeholder(part.flat.master, self.at))
                self.buffers.give(part.buffer, part.writes)
                is_last = todo[i + 1 :] == [] or todo[i + 1].unit is not part.unit
                if is_last and self.plan.parameters.on != "nvme":
                    yield [part.unit]
            self.buffers.drain()
            self.timeline = [bar for part in todo for bar in part.activities()]
            if self.plan.parameters.on == "nvme":
                # only now: who keeps units unsharded reads them again
                yield [unit for unit in units if unit.trainable]

    def _slices(
        self, unit: Unit, flat: Flat, optimizer: torch.optim.Optimizer
    ) -> Iterator[Slice]:
        """Cut the update of a flat's shard into what fits a staging buffer."""
        found = optimizer.state[flat.master].items()
        states = {k: v for k, v in found if getattr(v, "ndim", 0) == 1}
        others = {k: v for k, v in found if k not in states}
        fresh = not states
        if fresh:
            assert flat.group is not None
            group = optimizer.param_groups[flat.group]
            for key, dtype in state_layout(optimizer, group, flat.master).items():
                like = torch.empty(flat.master.shape, dtype=dtype, device="meta")
                if self.plan.optimizer.on == "nvme":
                    states[key] = self._allocate(like, "optimizer")
                else:
                    on = self.plan.optimizer.on
                    states[key] = empty(like.shape, dtype, on, "optimizer")
        stored = self._stored[flat.master]
        where = flat.master.device
        size = flat.master.numel()
        for a in range(0, size, self.buffer_size):
            b = min(a + self.buffer_size, size)

            def stage(tensor: Tensor, **options: Any) -> StagedTensor:
                swapped = self._swapped.get(tensor)
                dtype = options.pop("dtype", tensor.dtype)
                return StagedTensor(tensor, swapped, a, b, dtype, where, **options)

            # a separate master is rounded into the parameters
            values = stage(flat.shard, read=stored is flat.shard)
            master = values if stored is flat.shard else stage(stored)
            grad = stage(flat.mean, dtype=flat.master.dtype, written=False)
            parts = {k: stage(state, read=not fresh) for k, state in states.items()}
            yield Slice(unit, flat, values, grad, master, parts, others, fresh)
