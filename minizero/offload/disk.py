"""State on disk: placeholders for it, and the slices that its update takes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..memory.labels import host_empty
from ..memory.plan import Bytes, Plan
from ..zero.build import state_layout
from ..zero.flat import Flat, Unit
from ..zero.seams import Schedule
from .bus import empty, placeholder
from .host import Offload
from .staging import Slice, StagingBuffers
from .swap_file import ALIGN, StagedRecord, SwapFile, SwappedTensor, Transfer

# torch's fused Adam computes vectors, and rounds an incomplete one in another way
VECTOR = 64


class DiskStorage(Offload):
    """What the plan places on "nvme", with a placeholder for each tensor there.

    `buffer_count`: staging buffers in host memory, each with room for all that the
    update of `buffer_size` elements needs. `folder`: of the swap file (default: the
    environment's MINIZERO_NVME, or the folder for temporary files). `block_size`,
    `queue_depth`: bytes of a request, requests in flight.

    A disk that is full or fails raises DiskFault, which names the folder.
    Later calls are refused then: some slices may be updated and some not.
    """

    places: tuple[str, ...] = ("device", "cpu", "nvme")
    at = "cpu"

    def __init__(
        self, plan: Plan, folder: str | os.PathLike[str] | None = None, *,
        buffer_count: int = 4, buffer_size: int = 1 << 22,
        block_size: int = 1 << 20, queue_depth: int = 8,
    ) -> None:  # fmt: skip
        super().__init__(plan)
        for name, size, unit, what in (
            ("buffer_size", buffer_size, VECTOR, "elements"),
            ("block_size", block_size, ALIGN, "bytes"),
        ):
            if size < unit or size % unit:
                must = f"must be a multiple of {unit} {what}"
                raise ValueError(f"{name} {must}, not {size!r}")
        self.buffer_size, self.buffers = buffer_size, StagingBuffers(buffer_count)
        chosen = folder or os.environ.get("MINIZERO_NVME") or tempfile.gettempdir()
        self.swap = SwapFile(Path(chosen), block_size, queue_depth)
        self._swapped: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of placeholders
        # records that are read ahead of their use, in the order in which that comes
        self._ahead: dict[tuple[SwappedTensor, int], tuple[Tensor, Transfer]] = {}
        self._fault: BaseException | None = None

    def attach(self, plan: Plan, schedule: Schedule, optimizer: Optimizer) -> None:
        super().attach(plan, schedule, optimizer)
        if any(group.get("use_muon") for group in optimizer.param_groups):
            raise ValueError(
                "Muon needs whole matrices, and NVMe updates slices; use Offload, or "
                "AdamW for all groups"
            )

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
            # raised in a generator when the loop that it serves fails
            self.close(fault.__context__ if isinstance(fault, GeneratorExit) else fault)
            raise

    def close(self, why: BaseException | None = None) -> None:
        """Wait for what is under way, and give the disk's space back."""
        self._fault = self._fault or why or RuntimeError("close() was called")
        self.swap.close()

    @property
    def on_disk(self) -> Bytes:
        """Bytes of the tensors on disk, without what fills pages up."""
        found = Bytes()
        for swapped in self._swapped.values():
            nbytes = swapped.size * swapped.dtype.itemsize
            setattr(found, swapped.category, getattr(found, swapped.category) + nbytes)
        return found

    def swapped(self, tensor: Tensor) -> SwappedTensor | None:
        """The place on disk of what a placeholder stands for; None if it has none."""
        return self._swapped.get(self._stored.get(tensor, tensor))

    def _allocate(self, like: Tensor, category: str) -> Tensor:
        """A new, uninitialized tensor; a placeholder if its category is on disk."""
        on = getattr(self.plan, category).on
        if on != "nvme":
            return empty(like.shape, like.dtype, on, category)
        with self.guard():
            swapped = SwappedTensor(
                self.swap, category, like.numel(), like.dtype, self.buffer_size
            )
        made = placeholder(like, "cpu")
        self._swapped[made] = swapped
        return made

    def store(self, values: Tensor, category: str) -> Tensor:
        made = self._allocate(values, category)
        self.write_shard(made, values)
        return made

    def master(self, flat: Flat, copy: Tensor | None) -> Tensor:
        """Always a placeholder: the optimizer gets one slice after another."""
        values = flat.shard if copy is None else self.store(copy, "optimizer")
        master = placeholder(values, self.at)
        self._stored[master] = values
        return master

    def write_shard(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        swapped = self.swapped(shard)
        if swapped is None:
            return super().write_shard(shard, values, a)
        for part, at in self._records(swapped, a, a + len(values), write=True):
            part.copy_(values[at])

    def read_shard(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        swapped = self.swapped(shard)
        if swapped is None:
            return super().read_shard(shard, a, b)
        b = swapped.size if b is None else min(b, swapped.size)
        out = host_empty((b - a,), swapped.dtype, "buffers", temporary=True)
        for part, at in self._records(swapped, a, b):
            out[at] = part
        return out

    def _records(
        self, swapped: SwappedTensor, a: int, b: int, write: bool = False
    ) -> Iterator[tuple[Tensor, slice]]:
        """Yields each record's elements from a to b, in a buffer, and their slice."""
        with self.guard():
            self._cancel_reads()
            self.buffers.reserve(swapped.record_bytes)
            for record in range(a // swapped.step, -(-b // swapped.step)):
                start, stop = swapped.range(record)
                low, high = max(a, start), min(b, stop)
                buffer = self.buffers.take()
                if not write or high - low < stop - start:  # keeps the other elements
                    swapped.read(record, buffer).synchronize()
                elements = swapped.elements(record, buffer)
                yield elements[low - start : high - start], slice(low - a, high - a)
                uses = [swapped.write(record, buffer)] if write else []
                self.buffers.give(buffer, uses)
            self.buffers.drain()

    def _read_ahead(self, swapped: SwappedTensor, record: int) -> None:
        """Launch this record's read; later ones' while buffers are free."""
        upcoming = self.schedule.upcoming() if self.schedule else []
        coming = (f for u in upcoming for f in u.flats if not f.is_unsharded)
        shards = chain([swapped], (self.swapped(f.shard) for f in coming))
        places = ((s, i) for s in shards if s for i in range(s.records))
        self.buffers.reclaim()
        for where, i in islice(places, record, None):
            if not self.buffers.free and (where, i) != (swapped, record):
                break
            if (where, i) not in self._ahead:
                buffer = self.buffers.take()
                self._ahead[where, i] = buffer, where.read(i, buffer)

    def _cancel_reads(self) -> None:
        """Give the buffers of reads back that are not needed."""
        for buffer, reading in self._ahead.values():
            reading.synchronize()
            self.buffers.give(buffer)
        self._ahead.clear()

    def _slices(self, units: list[Unit], optimizer: Optimizer) -> list[Slice]:
        """Cut the update of each shard into what fits a buffer; reserve the buffers."""
        self._cancel_reads()
        found = []
        for unit, flat in [(u, flat) for u in units for flat in u.trainable]:
            master, state = flat.master, optimizer.state[flat.master]
            states = {k: v for k, v in state.items() if getattr(v, "ndim", 0) == 1}
            scalars = {k: v for k, v in state.items() if k not in states}
            made = bool(states)  # in an update before
            if not made:
                group = optimizer.param_groups[flat.group or 0]
                for key, dtype in state_layout(optimizer, group, master).items():
                    like = torch.empty(master.shape, dtype=dtype, device="meta")
                    states[key] = self._allocate(like, "optimizer")
            end, has_copy = master.numel(), self.has_master_copy(flat)
            for i in range(-(-end // self.buffer_size)):
                staged = partial(StagedRecord, self, i)
                assert flat.mean is not None
                # a master copy is rounded into them
                values = staged("parameters", flat.shard, is_read=not has_copy)
                grad = staged("gradients", flat.mean)
                copy = staged("optimizer", self._stored[master]) if has_copy else values
                own = {k: staged("optimizer", t, made) for k, t in states.items()}
                found += [Slice(unit, flat, values, grad, copy, own, state, scalars)]
        sizes = (sum(r.nbytes for r in part.records) for part in found)
        self.buffers.reserve(max(sizes, default=0))
        return found
