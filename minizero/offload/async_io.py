"""Reads and writes of a file that run beside other work."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ..memory.labels import aligned, host_empty, view

# what O_DIRECT asks of addresses, offsets and lengths: a multiple of the
# device's sector, which is 512 or 4096 bytes
ALIGN = 4096


class DiskFault(RuntimeError):
    """A file that cannot be made, written or read; `path`: it, or its folder."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path, self.problem = path, problem

    def __reduce__(self) -> tuple[type, tuple[Path, str]]:
        # a rank's error travels to the parent
        return type(self), (self.path, self.problem)


def explained(path: Path, error: OSError) -> DiskFault:
    """The same error as a DiskFault that says what to do."""
    advice = {
        errno.ENOSPC: "the disk is full; free space, or choose a folder on "
        "another disk",
        errno.EDQUOT: "the disk quota is used up; free space, or choose a "
        "folder elsewhere",
        errno.EFBIG: "the file may not grow so large; raise the limit "
        "(ulimit -f), or choose another file system",
    }
    return DiskFault(path, advice.get(error.errno or 0, error.strerror or str(error)))


def aligned_buffer(nbytes: int) -> Tensor:
    """Host memory, uint8, whole pages of `ALIGN`, that starts at a page.

    `ALIGN` bytes more are allocated, to cut it from; page-locked where
    there is a GPU.
    """
    pages = aligned(nbytes, ALIGN)
    whole = host_empty((pages + ALIGN,), torch.uint8, "buffers")
    start = -whole.data_ptr() % ALIGN
    return whole[start : start + pages]


class Transfer:
    """A read or a write under way; its buffer is in use until `wait`.

    `started`, `finished`: seconds of `time.perf_counter`; the second waits.
    """

    def __init__(
        self, path: Path, started: float, requests: list[Future[float]]
    ) -> None:
        self.path, self.started, self._requests = path, started, requests

    def wait(self) -> None:
        """Block until all requests are done; raises DiskFault."""
        for error in [request.exception() for request in self._requests]:
            if isinstance(error, OSError):
                raise explained(self.path, error) from error
            if error is not None:
                raise error

    def over(self) -> bool:
        """Whether `wait` would not block."""
        return all(request.done() for request in self._requests)

    @property
    def finished(self) -> float:
        return max((r.result() for r in self._requests), default=self.started)


class AsyncFile:
    """An open file, read and written by `queue_depth` threads.

    A request is `block_size` bytes. A thread waits in `preadv` or `pwrite`
    without Python's lock, so `queue_depth` requests are in flight. The names
    are those of DeepSpeed's `aio` section. `path` is for messages.
    """

    def __init__(
        self, fd: int, path: Path, block_size: int = 1 << 20, queue_depth: int = 8
    ) -> None:
        if block_size < ALIGN or block_size % ALIGN:
            raise ValueError(
                f"block_size must be a multiple of {ALIGN} bytes, not {block_size!r}"
            )
        if queue_depth < 1:
            raise ValueError(f"queue_depth must be at least 1, not {queue_depth!r}")
        self.fd, self.path, self.block_size = fd, path, block_size
        self._threads = ThreadPoolExecutor(queue_depth, "file")

    def read(self, offset: int, buffer: Tensor) -> Transfer:
        """Launch a read into a buffer, contiguous, in host memory.

        Where the file is direct, address, offset and length are multiples of
        `ALIGN`. `wait` raises DiskFault if the file ends too soon.
        """
        return self._launch(self._read, offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> Transfer:
        """Launch a write of a buffer, likewise."""
        return self._launch(self._write, offset, buffer)

    def close(self) -> None:
        """Wait for what is under way, and end the threads; `fd` stays open."""
        self._threads.shutdown()

    def _launch(
        self, request: Callable[[Tensor, int], float], offset: int, buffer: Tensor
    ) -> Transfer:
        started, data = time.perf_counter(), buffer.view(torch.uint8)
        # the slice that a thread has keeps the memory alive
        requests = [
            self._threads.submit(request, data[a : a + self.block_size], offset + a)
            for a in range(0, data.nbytes, self.block_size)
        ]
        return Transfer(self.path, started, requests)

    def _read(self, block: Tensor, at: int) -> float:
        left = view(block)
        while left:
            count = os.preadv(self.fd, [left], at)
            if count == 0:
                raise DiskFault(
                    self.path,
                    f"the file ends at byte {at:,}, and {len(left):,} more were "
                    "to be read; start again",
                )
            left, at = left[count:], at + count
        return time.perf_counter()

    def _write(self, block: Tensor, at: int) -> float:
        left = view(block)
        while left:
            count = os.pwrite(self.fd, left, at)
            left, at = left[count:], at + count
        return time.perf_counter()
