"""A file of this process that shards are stored in, read and written by threads."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..memory.labels import aligned, host_empty, view

# O_DIRECT needs addresses, offsets and lengths that are multiples of the device's
# sector, which is 512 or 4096 bytes
ALIGN = 4096


class DiskFault(RuntimeError):
    """A swap file that cannot be made, written or read; the message names its folder."""


def disk_fault(folder: Path, error: OSError) -> DiskFault:
    """The same error as a DiskFault, with what to do about it."""
    return DiskFault(f"{folder}: {error.strerror}; choose another folder or free space")


def aligned_buffer(nbytes: int) -> Tensor:
    """Host memory in whole pages of `ALIGN` bytes that starts at a page, uint8.

    It is page-locked where there is a GPU.
    """
    pages = aligned(nbytes, ALIGN)
    allocation = host_empty((pages + ALIGN,), torch.uint8, "buffers")
    start = -allocation.data_ptr() % ALIGN
    return allocation[start : start + pages]


class Transfer:
    """A read or a write under way; its buffer is in use until `synchronize` returns.

    `started`, `finished`: seconds of `time.perf_counter`; `finished` waits.
    """

    def __init__(self, started: float, requests: list[Future[float]]) -> None:
        self.started, self._requests = started, requests

    def synchronize(self) -> None:
        """Wait until all requests are done; raises DiskFault."""
        wait(self._requests)
        for request in self._requests:
            request.result()

    def query(self) -> bool:
        """Whether `synchronize` would not wait."""
        return all(request.done() for request in self._requests)

    @property
    def finished(self) -> float:
        return max((r.result() for r in self._requests), default=self.started)


class SwapFile:
    """A file without a name in `folder`, which only this process can reach.

    The system frees it when it is closed or the process ends, in whatever way. It
    bypasses the page cache (`O_DIRECT`) where the file system allows that.

    A transfer is cut into requests of `block_size` bytes. `queue_depth` threads each
    wait in `preadv` or `pwrite` without holding Python's lock, so that many requests
    are in flight. (Both names are those of DeepSpeed's `aio` section; a block is a
    multiple of `ALIGN`.) `size`: bytes allocated so far.
    """

    def __init__(
        self, folder: Path, block_size: int = 1 << 20, queue_depth: int = 8
    ) -> None:
        self.folder, self.block_size, self.size = folder, block_size, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # O_TMPFILE, or a name that is unlinked at once
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise disk_fault(folder, error) from error
        self._close_file = weakref.finalize(self, file.close)
        self.fd = file.fileno()
        with suppress(AttributeError, OSError):  # not every system can do it
            flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
        self._threads = ThreadPoolExecutor(queue_depth, "file")

    def allocate(self, nbytes: int) -> int:
        """The offset of `nbytes` new bytes; raises DiskFault now if the disk is full."""
        at, self.size = self.size, self.size + nbytes
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, at, nbytes)
            else:  # macOS: there a full disk is found by a write
                os.ftruncate(self.fd, self.size)
        except OSError as error:
            raise disk_fault(self.folder, error) from error
        return at

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        """Launch a read into contiguous host memory, in whole pages (`aligned_buffer`)."""
        return self._launch(os.preadv, offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> Transfer:
        """Launch a write of such memory."""
        return self._launch(os.pwritev, offset, buffer)

    def close(self) -> None:
        """Wait for what is under way, and let the system free the file."""
        self._threads.shutdown()
        self._close_file()

    def _launch(
        self, call: Callable[..., int], offset: int, buffer: Tensor
    ) -> Transfer:
        started, size = time.perf_counter(), self.block_size
        # the block that a thread gets keeps the memory alive
        requests = [
            self._threads.submit(self._request, call, block, offset + i * size)
            for i, block in enumerate(buffer.view(torch.uint8).split(size))
        ]
        return Transfer(started, requests)

    def _request(self, call: Callable[..., int], block: Tensor, at: int) -> float:
        """Read or write a block, in a thread; when that was done."""
        left = view(block)
        while left:
            try:
                count = call(self.fd, [left], at)
            except OSError as error:
                raise disk_fault(self.folder, error) from error
            if count == 0:
                raise DiskFault(
                    f"{self.folder}: the file ends at byte {at:,}, and {len(left):,} "
                    "more were to be read; start again"
                )
            left, at = left[count:], at + count
        return time.perf_counter()


class SwappedTensor:
    """The place of a tensor of [size] elements in a swap file.

    It is cut into records of `step` elements. Each record begins at a page, as direct
    I/O demands, and can be read and written alone. `record_bytes`: of the longest one,
    in whole pages.
    """

    def __init__(
        self, swap: SwapFile, category: str, size: int, dtype: torch.dtype, step: int
    ) -> None:
        self.category, self.size, self.dtype, self.step = category, size, dtype, step
        self.record_bytes = aligned(min(size, step) * dtype.itemsize, ALIGN)
        self.records = -(-size // step)
        full, rest = divmod(size, step)
        nbytes = full * self.record_bytes + aligned(rest * dtype.itemsize, ALIGN)
        self._swap, self._offset = swap, swap.allocate(nbytes)

    def range(self, record: int) -> tuple[int, int]:
        """The first element of a record, and the one after its last."""
        return record * self.step, min((record + 1) * self.step, self.size)

    def elements(self, record: int, buffer: Tensor) -> Tensor:
        """The elements of a record in a buffer that it was read into."""
        a, b = self.range(record)
        return buffer[: (b - a) * self.dtype.itemsize].view(self.dtype)

    def read(self, record: int, buffer: Tensor) -> Transfer:
        """Launch the read of a record into an aligned buffer that has room for it."""
        return self._swap.read(*self._place(record, buffer))

    def write(self, record: int, buffer: Tensor) -> Transfer:
        """Launch the write of a record from such a buffer."""
        return self._swap.write(*self._place(record, buffer))

    def _place(self, record: int, buffer: Tensor) -> tuple[int, Tensor]:
        pages = aligned(self.elements(record, buffer).nbytes, ALIGN)
        return self._offset + record * self.record_bytes, buffer[:pages]


class StagedRecord:
    """A record of a tensor, while the host updates it.

    `staged`: its elements, in host memory. `nbytes`: of its section of a buffer; 0 if
    they are used where they are. `is_read`: whether the update needs the old values.
    """

    def __init__(
        self, storage: Any, record: int, category: str, tensor: Tensor,
        is_read: bool = True,
    ) -> None:  # fmt: skip
        self.tensor, self.record, self.is_read = tensor, record, is_read
        size = storage.buffer_size
        self.stored = tensor[record * size : (record + 1) * size]
        in_place = getattr(storage.plan, category).on == "cpu"
        self.nbytes = 0 if in_place else aligned(self.stored.nbytes, ALIGN)
        self.swapped: SwappedTensor | None = storage.swapped(tensor)

    def launch_read(self, section: Tensor) -> list[Transfer]:
        """Copy or read the elements into a buffer's section, unless used in place."""
        self.section, self.staged = section, self.stored
        if self.nbytes:
            self.staged = section.view(self.stored.dtype)[: len(self.stored)]
            if self.is_read and self.swapped:
                return [self.swapped.read(self.record, section)]
            if self.is_read:
                self.staged.copy_(self.stored)
        return []

    def launch_write(self) -> list[Transfer]:
        """Send the elements back to where they came from."""
        if self.swapped:
            return [self.swapped.write(self.record, self.section)]
        if self.nbytes:
            self.stored.copy_(self.staged)
        return []
