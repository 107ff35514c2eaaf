"""A private file that shards are swapped out to."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..memory.labels import aligned, view
from .async_io import ALIGN, AsyncFile, DiskFault, Transfer, aligned_buffer, explained


class SwapFile(AsyncFile):
    """A file in `folder` that has no name, so only this process can reach it.

    The system frees it when it is closed or the process ends, however that
    ends. It is read and written past the page cache (`direct`) where the file
    system lets that happen. `size`: bytes that were allocated so far.
    """

    def __init__(
        self, folder: Path, block_size: int = 1 << 20, queue_depth: int = 8
    ) -> None:
        super().__init__(-1, folder, block_size, queue_depth)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # O_TMPFILE, or a name that is unlinked at once
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise DiskFault(
                folder,
                f"cannot be written to ({error.strerror}); choose another folder",
            ) from error
        self._end = weakref.finalize(self, file.close)
        self.fd, self.size = file.fileno(), 0
        self.direct = _made_direct(self.fd)
        self._free: dict[int, list[int]] = defaultdict(list)

    def allocate(self, nbytes: int) -> int:
        """The offset of `nbytes` (whole pages) for one owner.

        Raises DiskFault now if the disk is full, and not in the middle of a
        step.
        """
        if self._free[nbytes]:
            return self._free[nbytes].pop()
        at, self.size = self.size, self.size + nbytes
        try:
            if hasattr(os, "posix_fallocate") and nbytes:
                os.posix_fallocate(self.fd, at, nbytes)
            else:
                os.ftruncate(self.fd, self.size)
        except OSError as error:
            raise explained(self.path, error) from error
        return at

    def free(self, at: int, nbytes: int) -> None:
        """Give those bytes to the next who asks for as many."""
        self._free[nbytes].append(at)

    def close(self) -> None:
        """Wait for what is under way, and let the system free the file."""
        super().close()
        self._end()


def _made_direct(fd: int) -> bool:
    """Read and write an empty file past the page cache from now on: tried."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags, page = fcntl.fcntl(fd, fcntl.F_GETFL), aligned_buffer(ALIGN)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(fd, view(page.zero_()), 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    os.ftruncate(fd, 0)
    return True


class SwappedShard:
    """The place of one shard, [size], in a swap file: records of its elements.

    A record starts at a page, as direct I/O asks, so that each can be read
    and written alone. `starts`: the first element of each. `payload`, `nbytes`: the
    shard's bytes, without and with what fills pages up. `largest`: those of a record.
    """

    def __init__(
        self,
        swap: SwapFile,
        category: str,
        size: int,
        dtype: torch.dtype,
        starts: Sequence[int],
    ) -> None:
        self.category, self.size, self.dtype = category, size, dtype
        self.ranges = list(pairwise([*starts, size]))
        self.records = len(self.ranges)
        rooms = [self.room(b - a) for a, b in self.ranges]
        self.payload = size * dtype.itemsize
        self.nbytes, self.largest = sum(rooms), max(rooms, default=0)
        self._swap, self.offset = swap, swap.allocate(self.nbytes)
        self._offsets = list(accumulate(rooms, initial=self.offset))

    def room(self, elements: int) -> int:
        """Bytes of whole pages that so many elements take."""
        return aligned(elements * self.dtype.itemsize, ALIGN)

    def read(self, record: int, buffer: Tensor) -> Transfer:
        """Launch the read of a record into an aligned buffer that has room for it."""
        at, data = self._place(record, buffer)
        return self._swap.read(at, data)

    def write(self, record: int, buffer: Tensor) -> Transfer:
        """Launch the write of a record from such a buffer."""
        at, data = self._place(record, buffer)
        return self._swap.write(at, data)

    def elements(self, record: int, buffer: Tensor) -> Tensor:
        """The elements of a record in such a buffer."""
        a, b = self.ranges[record]
        return buffer[: (b - a) * self.dtype.itemsize].view(self.dtype)

    def free(self) -> None:
        """Give the place to another shard."""
        self._swap.free(self.offset, self.nbytes)

    def _place(self, record: int, buffer: Tensor) -> tuple[int, Tensor]:
        used = self.room(self.elements(record, buffer).numel())
        return self._offsets[record], buffer[:used]
