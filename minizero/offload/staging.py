"""A bounded number of host buffers, and how shards pass through them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from ..memory import labels
from ..memory.bytes import aligned
from .async_io import ALIGN, Transfer, aligned_buffer
from .swap_file import SwappedShard


class StagingBuffers:
    """`count` buffers in host memory, of one size; there are never more.

    `size`: bytes of one. `nbytes`: what all of them take.
    """

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(
                f"buffer_count must be at least 1, not {count!r}"
            )
        self.count, self.size = count, 0
        self._free: list[Tensor] = []
        self._busy: deque[tuple[Tensor, list[Transfer]]] = deque()

    @property
    def nbytes(self) -> int:
        # each is cut from an allocation that is a page longer
        return self.count * (self.size + ALIGN) if self.size else 0

    @property
    def free(self) -> int:
        """How many buffers nobody has."""
        return len(self._free)

    def reserve(self, size: int) -> None:
        """Have buffers of `size` bytes; all must have been given back."""
        size = max(size, ALIGN)
        if size > self.size:
            self.drain()
            self._free.clear()  # first, so that old and new never coexist
            self.size = aligned(size, ALIGN)
            every = range(self.count)
            self._free = [aligned_buffer(self.size) for _ in every]

    def take(self) -> Tensor:
        """A buffer; waits for the oldest writes if none is free."""
        if not self._free:
            self._wait_oldest()
        return self._free.pop()

    def give(
        self, buffer: Tensor, writes: list[Transfer] | None = None
    ) -> None:
        """Give a buffer back: now, or when these writes are over."""
        if writes:
            self._busy.append((buffer, writes))
        else:
            self._free.append(buffer)

    def drain(self) -> None:
        """Wait for every write."""
        while self._busy:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        buffer, writes = self._busy.popleft()
        for write in writes:
            write.wait()
        self._free.append(buffer)


@dataclass(eq=False)
class StagedTensor:
    """Elements a to b of a shard's tensor, while they are updated.

    `tensor`: [size]; it only stands for the elements if they are `swapped`.
    `on`: where it rests. `at`: where the optimizer works, `device` as torch
    says it. `here`: the elements there, in `dtype`. `read`, `written`:
    whether the update does that to them.
    """

    tensor: Tensor
    swapped: SwappedShard | None
    on: str
    at: str
    device: torch.device
    a: int
    b: int
    dtype: torch.dtype
    read: bool = True
    written: bool = True
    reading: Transfer | None = None

    @property
    def room(self) -> int:
        """Bytes that it needs of a staging buffer."""
        alike = self.on == self.at and self.tensor.dtype == self.dtype
        if self.swapped is None and (alike or self.at == "device"):
            return 0
        return aligned((self.b - self.a) * self.dtype.itemsize, ALIGN)

    def bring(self, section: Tensor) -> None:
        """Launch what brings the elements into `room` bytes of a buffer."""
        self.section = section
        self.near = rests = self.tensor[self.a : self.b]
        if self.room:
            nbytes = (self.b - self.a) * self.dtype.itemsize
            self.near = section[:nbytes].view(self.dtype)
        if self.swapped is not None and self.read:
            record = self.a // self.swapped.width
            self.reading = self.swapped.read(record, section)
        elif self.room and self.read:
            self.near.copy_(rests)

    def arrive(self) -> None:
        """Wait until the elements are where the optimizer works."""
        if self.reading is not None:
            self.reading.wait()
        self.here = self.near
        if self.at == "device" and self.on != "device":
            empty = torch.empty_like(self.near, device=self.device)
            self.here = labels.label(empty, "buffers", on="device")
            self.here.copy_(self.near)

    def leave(self) -> Transfer | None:
        """Send the elements back; the write that was launched, if any."""
        here, self.here = self.here, self.near
        if self.written and here is not self.near:
            self.near.copy_(here)
        if self.written and self.swapped is not None:
            record = self.a // self.swapped.width
            return self.swapped.write(record, self.section)
        if self.written and self.room:
            self.tensor[self.a : self.b].copy_(self.near)
        return None
