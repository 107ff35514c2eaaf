"""A bounded pool of host buffers, and what passes through it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minizero import tracker
from minizero.files import ALIGN, Transfer, aligned, aligned_buffer
from minizero.flat import Flat, Unit
from minizero.offload import place
from minizero.records import Reading, ShardFile, record_bytes


class Pool:
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
            self.size = aligned(size)
            self._free = [aligned_buffer(self.size) for _ in range(self.count)]

    def take(self) -> Tensor:
        """A buffer; waits for the oldest write if none is free."""
        if not self._free:
            self._settle()
        return self._free.pop()

    def give(
        self, buffer: Tensor, writes: list[Transfer] | None = None
    ) -> None:
        """Give a buffer back: now, or when these writes are over."""
        if writes:
            self._busy.append((buffer, writes))
        else:
            self._free.append(buffer)

    def _settle(self) -> None:
        buffer, writes = self._busy.popleft()
        for write in writes:
            write.wait()
        self._free.append(buffer)

    def drain(self) -> None:
        """Wait for every write."""
        while self._busy:
            self._settle()


@dataclass
class Span:
    """A bar of a timeline: what a lane did for a unit, from when to when.

    `lane`: "read", "step" or "write". Seconds of `time.perf_counter`.
    """

    lane: str
    unit: str
    started: float
    finished: float


@dataclass
class Part:
    """Elements a to b of one shard, while they are updated.

    `whole`: [size], the shard; with a `file` it only stands for the shard.
    `at`: where the optimizer works, "device" or "cpu", and `device` as torch
    says it; `here` are the elements there, in `dtype`. `wanted`: whether the update reads them.
    `section`: their room in a pool buffer, where they need one.
    """

    whole: Tensor
    file: ShardFile | None
    a: int
    b: int
    at: str
    device: torch.device
    dtype: torch.dtype
    wanted: bool = True
    section: Tensor | None = None
    reading: Reading | None = None
    here: Tensor = field(init=False)

    @property
    def staged(self) -> bool:
        """Whether it passes through a pool buffer."""
        if self.file is not None:
            return True
        same = place(self.whole) == "cpu" and self.whole.dtype == self.dtype
        return self.at == "cpu" and not same

    @property
    def room(self) -> int:
        """Bytes that it needs of a pool buffer."""
        return record_bytes(self.b - self.a, self.dtype) if self.staged else 0

    @property
    def _source(self) -> Tensor:
        return self.whole[self.a : self.b]

    def bring(self) -> None:
        """Launch what brings the elements here."""
        if self.file is not None and self.wanted:
            assert self.section is not None
            self.reading = self.file.read(self._record, self.section)
        elif self.file is None and self.section is not None:
            self.here = self._in_section()
            if self.wanted:
                self.here.copy_(self._source)

    def arrive(self) -> None:
        """Wait until the elements are here."""
        if self.reading is not None:
            self.reading.wait()
        if self.file is None and self.section is not None:
            return
        elements = self._source if self.file is None else self._in_section()
        if place(elements) == self.at:
            self.here = elements
        else:
            empty = torch.empty_like(elements, device=self.device)
            here = tracker.label(empty, "buffers", on="device")
            self.here = here.copy_(elements)

    def leave(self) -> list[Transfer]:
        """Send the elements back; the writes that were launched."""
        home = self._source if self.file is None else self._in_section()
        if home.data_ptr() != self.here.data_ptr():
            home.copy_(self.here)
        if self.file is None:
            return []
        assert self.section is not None
        return [self.file.write(self._record, self.section)]

    @property
    def _record(self) -> int:
        assert self.file is not None
        return self.a // self.file.width

    def _in_section(self) -> Tensor:
        assert self.section is not None
        nbytes = (self.b - self.a) * self.dtype.itemsize
        return self.section[ALIGN : ALIGN + nbytes].view(self.dtype)


@dataclass(eq=False)
class Row:
    """One owned row, and all that its update needs.

    `lent`: what the optimizer has for a parameter. `master`: where the
    precision keeps a copy apart. `states`: the element-wise states by name;
    `others`: the rest as it was before this step, such as a step counter.
    `fresh`: the optimizer has yet to make its states.
    """

    unit: Unit
    flat: Flat
    owned: Tensor
    grad: Tensor
    lent: Tensor
    master: Tensor | None
    states: dict[str, Tensor]
    others: dict[str, Any]
    fresh: bool


@dataclass(eq=False)
class Piece:
    """Some elements of a row, on their way through a pool buffer."""

    row: Row
    owned: Part
    grad: Part
    master: Part
    states: dict[str, Part]
    buffer: Tensor | None = None

    @property
    def parts(self) -> list[Part]:
        parts = [self.owned, self.grad, *self.states.values()]
        return parts if self.master is self.owned else [*parts, self.master]

    @property
    def room(self) -> int:
        """Bytes that it needs of a buffer."""
        return sum(part.room for part in self.parts)

    def bring(self, buffer: Tensor) -> None:
        """Launch all reads and copies into this buffer."""
        self.buffer, start = buffer, 0
        for part in self.parts:
            if part.staged:
                part.section = buffer[start : start + part.room]
                start += part.room
            part.bring()

    def arrive(self) -> Span:
        """Wait until everything is there; when it was read."""
        for part in self.parts:
            part.arrive()
        reads = [part.reading for part in self.parts if part.reading]
        return span("read", self.row.unit, reads)

    def leave(self) -> list[Transfer]:
        """Launch all writes."""
        parts = [part for part in self.parts if part is not self.grad]
        return [write for part in parts for write in part.leave()]


def span(
    lane: str, unit: Unit, transfers: Sequence[Reading | Transfer]
) -> Span:
    """The bar of some transfers that are over."""
    started = min((t.started for t in transfers), default=0.0)
    finished = max((t.finished for t in transfers), default=0.0)
    return Span(lane, unit.name, started, finished)
