"""A bounded number of host buffers, and slices of state in them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..memory import labels
from ..memory.labels import aligned
from ..ranks import device
from ..zero.flat import Flat, Unit
from .bus import CopyEvent
from .swap_file import ALIGN, Transfer, aligned_buffer

Use = Transfer | CopyEvent


class StagingBuffers:
    """`count` buffers in host memory, of one size; there are never more.

    `size`: bytes of one. `nbytes`: of all. `free`: the unused ones.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(
                f"buffer_count must be at least 1, not {count!r}"
            )
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
        """A buffer; waits for the oldest uses if none is free."""
        if not self.free:
            self._wait_oldest()
        return self.free.pop()

    def give(self, buffer: Tensor, uses: Sequence[Use] = ()) -> None:
        """Give a buffer back; it is free when these uses of it are over."""
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


class StagedTensor:
    """Elements a to b of a tensor of some category, while they are updated.

    `here`: a copy of them where the optimizer works; or they themselves, if
    they are stored there. `read`, `written`: whether the update needs their
    old values, and changes them. `swapped`: where they are if they are on
    disk; a and b are then the borders of a record. `room`: bytes that they
    need of a staging buffer. `storage`: an `NVMe`.
    """

    def __init__(
        self, storage: Any, category: str, tensor: Tensor, a: int, b: int
    ) -> None:
        on, at = getattr(storage.plan, category).on, storage.at
        self.tensor, self.a, self.b = tensor, a, b
        self.swapped = storage.swapped(tensor)
        self.reading: Transfer | None = None
        self.read = self.written = True
        self.goes_up = at == "device" and on != at
        self.room = 0
        if on == "nvme" or (at == "cpu" and on != at):
            self.room = aligned((b - a) * tensor.itemsize, ALIGN)

    def launch_read(self, section: Tensor) -> None:
        """Launch what brings the elements to `room` bytes of a buffer."""
        self.section = section
        self.near = stored = self.tensor[self.a : self.b]
        if self.room:
            self.near = section.view(self.tensor.dtype)[: self.b - self.a]
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
        if self.goes_up:
            copied = self.near.to(device(), copy=True)
            self.here = labels.label(copied, "buffers", on="device")

    def launch_write(self) -> list[Transfer]:
        """Send the elements back; the transfers to the disk."""
        here, self.here = self.here, self.near
        if not self.written:
            return []
        if here is not self.near:
            self.near.copy_(here)
        if self.swapped is not None:
            record = self.a // self.swapped.step
            return [self.swapped.write(record, self.section)]
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

    def launch_writes(self, state: dict[str, Any], blank: Tensor) -> None:
        """Launch all writes; the optimizer is left with placeholders."""
        for key, staged in self.states.items():
            if state[key].data_ptr() != staged.here.data_ptr():
                staged.here.copy_(state[key])
            state[key] = staged.tensor
        self.flat.master.data = blank
        del self.flat.staged_shard
        found = (tensor.launch_write() for tensor in self.tensors)
        self.writes = [write for writes in found for write in writes]
