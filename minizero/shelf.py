"""Shards that rest in files, and how they come and go."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from minizero import tracker
from minizero.files import AsyncFiles
from minizero.memory import Bytes, Plan
from minizero.offload import Offload
from minizero.records import Reading, ShardFile
from minizero.scratch import RunFolder
from minizero.seams import host_empty
from minizero.staging import Pool

CPU = torch.device("cpu")


class Shelf(Offload):
    """Keeps shards in files; `NVMe` is the one that can update them."""

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
        if buffer_size < 1:
            raise ValueError(
                f"buffer_size must be at least 1 element, not {buffer_size!r}"
            )
        self.at = "device" if plan.optimizer.on == "device" else "cpu"
        self.buffer_size = buffer_size
        self.pool = Pool(buffer_count)
        self.disk = AsyncFiles(block_size, queue_depth)
        chosen = folder or os.environ.get("MINIZERO_NVME")
        where = Path(chosen or tempfile.gettempdir())
        self.folder = RunFolder(where, self.disk)
        # by what stands for the shard; and the other way round, by path
        self._files: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._by_path: weakref.WeakValueDictionary[Path, ShardFile] = (
            weakref.WeakValueDictionary()
        )
        self._nans: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._ahead: deque[Reading] = deque()
        self._next: dict[tuple[Path | None, Path], Path] = {}
        self._last: tuple[Path | None, Path | None] = (None, None)
        self._fault: BaseException | None = None

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After a fault nothing of this home is used any more."""
        if self._fault is not None:
            raise RuntimeError(
                f"the state in files is lost since this: {self._fault!r}; "
                "start again"
            ) from self._fault
        try:
            yield
        except BaseException as fault:
            self.close(fault)
            raise

    def close(self, why: BaseException | None = None) -> None:
        """Wait for what is under way, and delete the files."""
        if self._fault is None:
            self._fault = why or RuntimeError("close() was called")
            self.disk.close()
            self.folder.close()

    @property
    def on_disk(self) -> Bytes:
        """Bytes of the shards in files, without headers and padding."""
        found = Bytes()
        for file in self._files.values():
            had = getattr(found, file.category)
            setattr(found, file.category, had + file.payload)
        return found

    @property
    def file_bytes(self) -> int:
        """Bytes of the files: the shards, headers and padding."""
        return sum(file.nbytes for file in self._files.values())

    def rest(self, row: Tensor, category: str) -> Tensor:
        if getattr(self.plan, category).on != "nvme":
            return super().rest(row, category)
        if row.ndim == 0:  # a step counter
            host = host_empty((), row.dtype, category)
            return host.copy_(row)
        # the optimizer's tensors are the host's, where it works
        device = row.device if category == "parameters" else CPU
        shard = self.new_shard(category, row.numel(), row.dtype, device)
        self.lower(shard, row)
        return shard

    def new_shard(
        self,
        category: str,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Make a file; what stands for its shard reads as NaN, [size].

        The file lives as long as that.
        """
        width = min(self.buffer_size, size)
        with self._guard():
            file = ShardFile(self.folder, category, size, dtype, width)
        shard = self._nan(dtype, device).expand(size)
        self._files[shard] = self._by_path[file.path] = file
        weakref.finalize(shard, file.remove)
        return shard

    def _nan(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        if (dtype, device) not in self._nans:
            value = torch.nan if dtype.is_floating_point else 0
            nan = torch.full((), value, dtype=dtype, device=device)
            on = "cpu" if device == CPU else None
            self._nans[dtype, device] = tracker.label(nan, "buffers", on=on)
        return self._nans[dtype, device]

    def lower(self, shard: Tensor, row: Tensor) -> None:
        file = self._files.get(shard)
        if file is None:
            return super().lower(shard, row)
        with self._guard():
            self._forget_ahead()
            self.pool.reserve(file.stride)
            for index, (a, b) in enumerate(file.ranges()):
                buffer = self.pool.take()
                file.data(buffer, index).copy_(row[a:b])
                self.pool.give(buffer, [file.write(index, buffer)])
            self.pool.drain()

    def lift(self, shard: Tensor, row: Tensor) -> Tensor:
        """What an all-gather into the buffer around `row` reads.

        A shard in a file is read into `row`, through the pool.
        """
        file = self._files.get(shard)
        if file is None:
            return super().lift(shard, row)
        with self._guard():
            for index, (a, b) in enumerate(file.ranges()):
                reading = self._take_ahead(file, index)
                self._read_ahead(file, index)
                row[a:b].copy_(reading.wait())
                self.pool.give(reading.buffer)
            before, self._last = self._last, (self._last[1], file.path)
            if before[1] is not None:
                self._next[before[0], before[1]] = file.path
        return row

    def _take_ahead(self, file: ShardFile, index: int) -> Reading:
        """The read of a record: launched before, or now."""
        if self._ahead:
            first = self._ahead[0]
            if first.file is file and first.index == index:
                return self._ahead.popleft()
            self._forget_ahead()
        return file.read(index, self.pool.take())

    def _read_ahead(self, file: ShardFile, index: int) -> None:
        """Launch what comes next into the buffers that are free."""
        coming = islice(self._after(file, index), len(self._ahead), None)
        for later, record in coming:
            if not self.pool.free:
                break
            self._ahead.append(later.read(record, self.pool.take()))

    def _after(
        self, file: ShardFile, index: int
    ) -> Iterator[tuple[ShardFile, int]]:
        """The records after this one, as they came the last time."""
        for record in range(index + 1, file.records):
            yield file, record
        found = self._by_path.get(
            self._next.get((self._last[1], file.path), file.path)
        )
        if found is not None and found is not file:
            for record in range(found.records):
                yield found, record

    def _forget_ahead(self) -> None:
        """Give the buffers of reads back that nobody has asked for."""
        while self._ahead:
            reading = self._ahead.popleft()
            reading.wait()
            self.pool.give(reading.buffer)
