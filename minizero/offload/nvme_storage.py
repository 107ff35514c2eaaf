"""Shards that rest in a swap file, and how they come and go between updates."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..memory import labels
from ..memory.labels import host_empty
from ..memory.plan import Bytes, Plan
from ..ranks.launch import rank
from ..zero.flat_buffer import Flat
from ..zero.muon import cuts
from .host import HostStorage
from .read_ahead import ReadAhead
from .staging import StagedTensor, StagingBuffers
from .swap_file import SwapFile, SwappedShard

CPU = torch.device("cpu")
# The optimizer's vector instructions round the elements at an end that is no whole
# vector in another way.
VECTOR = 64


class DiskStorage(HostStorage):
    """Keeps shards in a swap file; `NVMe` is the one that can update them.

    A tensor stands for such a shard: it has the shape, takes no memory of its own and
    reads as NaN. The place in the file is free again when the tensor is gone. Before
    an all-gather a shard is read through the staging buffers, and what came next the
    last time is read ahead.

    `folder`: of the swap file (default: the environment's MINIZERO_NVME, or the folder
    for temporary files). `buffer_count`, `buffer_size`: staging buffers, and elements
    that are updated in one; of what an optimizer needs whole, one parameter. `block_size`,
    `queue_depth`: bytes of a request, requests in flight.
    """

    places: tuple[str, ...] = ("device", "cpu", "nvme")
    several = False

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
        self.ahead = ReadAhead(self.buffers)
        # by what stands for the shard
        self._swapped: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._apart: dict[Flat, list[Tensor | None]] = {}
        self._fault: BaseException | None = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """After a fault nothing of this home is used any more."""
        if self._fault is not None:
            raise RuntimeError(
                f"the state in files is lost since this: {self._fault!r}; start again"
            ) from self._fault
        try:
            yield
        except BaseException as fault:
            # what fails where a slice is updated ends `staged` from outside
            ended = isinstance(fault, GeneratorExit)
            self.close(fault.__context__ if ended else fault)
            raise

    def close(self, why: BaseException | None = None) -> None:
        """Wait for what is under way, and give the disk's space back."""
        if self._fault is None:
            self._fault = why or RuntimeError("close() was called")
            self.swap.close()

    @property
    def on_disk(self) -> Bytes:
        """Bytes of the shards on disk, without what fills pages up."""
        found = Bytes()
        for shard in self._swapped.values():
            had = getattr(found, shard.category)
            setattr(found, shard.category, had + shard.payload)
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes that these shards take in the swap file."""
        return sum(shard.nbytes for shard in self._swapped.values())

    def starts(self, flat: Flat) -> Sequence[int]:
        """Where each part of the own shard begins that is updated at once."""
        if flat.uncut and (matrices := cuts(flat, rank())):
            _, *others = sorted(start for start, _ in matrices)
            return 0, *others  # what fills the shard up goes with the last
        return range(0, flat.size, self.buffer_size)

    def new_shard(
        self,
        category: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        flat: Flat | None,
    ) -> Tensor:
        """Allocate in the swap file; what stands for the shard, [size]."""
        starts = range(0, size, self.buffer_size) if flat is None else self.starts(flat)
        with self.guard():
            shard = SwappedShard(self.swap, category, size, dtype, starts)
        stand_in = self._nan(dtype, device).expand(size)
        self._swapped[stand_in] = shard
        weakref.finalize(stand_in, shard.free).atexit = False
        return stand_in

    def _nan(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._nans:
            value = torch.nan if dtype.is_floating_point else 0
            nan = torch.full((), value, dtype=dtype, device=device)
            on = "cpu" if device == CPU else None
            self._nans[dtype, device] = labels.label(nan, "buffers", on=on)
        return self._nans[dtype, device]

    def store(
        self, values: Tensor, category: str, flat: Flat | None = None
    ) -> Tensor:
        if getattr(self.plan, category).on != "nvme":
            return super().store(values, category)
        if values.ndim == 0:  # a step counter
            return host_empty((), values.dtype, category).copy_(values)
        # the optimizer's tensors are the host's, where it works
        device = values.device if category == "parameters" else CPU
        shard = self.new_shard(category, values.numel(), values.dtype, device, flat)
        self.write_back(shard, values)
        return shard

    def load(self, shard: Tensor, into: Tensor) -> Tensor:
        swapped = self._swapped.get(shard)
        if swapped is None:
            return super().load(shard, into)
        with self.guard():
            self.ahead.read(swapped, into, self.up)
        return into

    def in_host_memory(self, shard: Tensor) -> bool:
        return shard not in self._swapped and super().in_host_memory(shard)

    def write_back(self, shard: Tensor, values: Tensor, a: int = 0) -> None:
        swapped = self._swapped.get(shard)
        if swapped is None:
            return super().write_back(shard, values, a)
        with self.guard():
            for record, start, low, high in self._records(swapped, a, a + len(values)):
                buffer = self.buffers.take()
                elements = swapped.elements(record, buffer)
                if high - low < len(elements):
                    swapped.read(record, buffer).wait()
                elements[low - start : high - start] = values[low - a : high - a]
                self.buffers.give(buffer, [swapped.write(record, buffer)])
            self.buffers.drain()

    def fetch(self, shard: Tensor, a: int = 0, b: int | None = None) -> Tensor:
        swapped = self._swapped.get(shard)
        if swapped is None:
            return super().fetch(shard, a, b)
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
        self, swapped: SwappedShard, a: int, b: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Records that have some of elements a to b: number, start, first and last."""
        self.ahead.cancel()
        self.buffers.reserve(swapped.largest)
        for record, (start, stop) in enumerate(swapped.ranges):
            low, high = max(a, start), min(b, stop)
            if low < high:
                yield record, start, low, high

    def masters(
        self, flat: Flat, shards: list[Tensor], masters: list[Tensor]
    ) -> list[Tensor]:
        apart = masters[0] is not shards[0]
        self._apart[flat] = [
            self.store(master, "optimizer", flat) if apart else None for master in masters
        ]
        return self.lend(flat, masters)

    def resting(
        self, flat: Flat, masters: list[Tensor], shards: list[Tensor]
    ) -> list[Tensor]:
        pairs = zip(self._apart[flat], shards, strict=True)
        return [shard if apart is None else apart for apart, shard in pairs]

    def refresh(
        self,
        flat: Flat,
        masters: list[Tensor],
        shards: list[Tensor],
        read: Callable[[list[Tensor], list[Tensor]], None],
    ) -> None:
        for apart, shard in zip(self._apart[flat], shards, strict=True):
            if apart is not None:
                near = [self._whole(t, flat.full.device) for t in (apart, shard)]
                read(near[:1], near[1:])
                self.write_back(apart, near[0])

    def _whole(self, shard: Tensor, device: torch.device) -> Tensor:
        if shard not in self._swapped:
            return shard.to(device)
        into = torch.empty_like(shard, device=device)
        self.up.follow()  # who had that memory before
        self.load(shard, into)
        self.up.event().wait("device")
        return into

    def new_state(self, flat: Flat, name: str, dtype: torch.dtype) -> Tensor:
        """Room for a state that the optimizer has yet to make, [size]."""
        on = self.plan.optimizer.on
        if on == "nvme":
            return self.new_shard("optimizer", flat.size, dtype, CPU, flat)
        if on == "cpu":
            return host_empty((flat.size,), dtype, "optimizer")
        empty = flat.full.new_empty(flat.size, dtype=dtype)
        return labels.label(empty, "optimizer", on="device")

    def stage(
        self,
        flat: Flat,
        record: int,
        a: int,
        b: int,
        category: str,
        tensor: Tensor,
        **options: Any,
    ) -> StagedTensor:
        """A record, elements a to b, of a tensor of that category, to be updated."""
        return StagedTensor(
            tensor,
            self._swapped.get(tensor),
            record,
            getattr(self.plan, category).on,
            self.at,
            CPU if self.at == "cpu" else flat.full.device,
            a,
            b,
            **{"dtype": tensor.dtype, **options},
        )
